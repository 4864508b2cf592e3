"""LoGRA under transformers' Trainer: the steps of a plain loop, a log that shows them, and settings under which sketches would be lost."""

import math

import models
import pytest
import torch
import transformers

import logra
from logra.integrations import equip


class Seen(transformers.TrainerCallback):
    """What a reporter, such as Weights & Biases', is given."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def made(out, optimizer=None, callbacks=(), **settings):
    model = models.llama()
    sketches = logra.attach(model, 16)
    optimizer = optimizer or logra.RowAdam(sketches, relative_step=1e-2)
    data = [{"input_ids": row, "labels": row} for row in models.ids(16, 9)]
    args = transformers.TrainingArguments(out, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", max_steps=4, per_device_train_batch_size=2,
                                          train_sampling_strategy="sequential", **settings)
    return transformers.Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=list(callbacks)), sketches, data


@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_the_trainer_makes_the_steps_of_a_plain_loop(clip, tmp_path):
    seen = Seen()
    trainer, sketches, data = made(tmp_path, callbacks=[seen], gradient_accumulation_steps=2, max_grad_norm=clip)
    equip(trainer, logra.KLControl(logra.ConstantBudget(1e-3)), responses=3)
    trainer.train()
    model = models.llama().train()
    own = logra.attach(model, 16)
    optimizer = logra.RowAdam(own, relative_step=1e-2)
    control, schedule = logra.KLControl(logra.ConstantBudget(1e-3)), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 4)
    for update in range(4):
        ids = torch.stack([row["input_ids"] for row in data[4 * update:4 * update + 4]])
        for micro in ids.split(2):
            (models.loss(model, micro) / (4 * 8)).backward()
        norm = own.clip_norm_(clip or math.inf)
        row = [log for log in seen.logs if "grad_norm" in log][update]
        if float(schedule.get_last_lr()[0]) > 0:
            alpha = control.scale(model, optimizer.propose(), logra.Contexts.of_responses(ids[:3], torch.ones_like(ids[:3]), torch.ones_like(ids[:3])))
            assert (row["alpha"], row["predicted_kl"]) == pytest.approx((alpha, alpha ** 2 * control.q), rel=1e-3)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-3) and row["learning_rate"] == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step(alpha), schedule.step(), optimizer.zero_grad()
    for name in own:
        torch.testing.assert_close(sketches[name].weight, own[name].weight, rtol=0, atol=1e-4 * float(own[name].weight.detach().abs().max()))
        assert sketches[name].weight.grad is None
    assert [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row] == [row["grad_norm"] for row in seen.logs if "grad_norm" in row]


def test_settings_under_which_sketches_would_be_lost_are_refused(tmp_path):
    trainer, sketches, _ = made(tmp_path)
    for field, value, words in (("fp16", True, "fp16: set bf16=True"), ("_n_gpu", 2, "2 GPUs in one process: start one process a GPU")):
        before = getattr(trainer.args, field)
        setattr(trainer.args, field, value)
        with pytest.raises(ValueError, match=words):
            equip(trainer)
        setattr(trainer.args, field, before)
    trainer, *_ = made(tmp_path, torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    with pytest.raises(ValueError, match="optimizer is SGD: give it optimizers="):
        equip(trainer)


def test_reentrant_checkpointing_under_the_trainer_says_what_to_set(tmp_path):
    trainer, *_ = made(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    equip(trainer)
    with pytest.raises(RuntimeError, match="reentrant activation checkpointing, which loses sketches"):
        trainer.train()

"""LoGRA under transformers' Trainer and what derives from it, such as TRL's trainers. Needs transformers; TRL is not imported.

    sketches  = logra.attach(model, rank=64)
    optimizer = logra.RowAdam(sketches, relative_step=1e-3)
    trainer   = Trainer(model, args, train_dataset=..., optimizers=(optimizer, None))
    equip(trainer, logra.KLControl(logra.ConstantBudget(1e-3)))
    trainer.train()

The Trainer's schedule acts on the relative step, its `max_grad_norm` on ‖S‖, and its log shows ‖S‖ as `grad_norm`. A checkpoint has the
optimizer's state and the control's. In several processes sketches are averaged over them (`logra.Replicas`).
"""

import math

from transformers import Trainer, TrainerCallback

from logra.kl import KLControl
from logra.loops import StepControl
from logra.optim import SketchOptimizer
from logra.replicas import Replicas


class SketchCallback(TrainerCallback):
    """Clips the sketches before a step, and puts their norm and the step's α into what the Trainer logs."""

    def __init__(self, sketches, steps: StepControl | None):
        self.sketches, self.steps, self.norm = sketches, steps, math.nan

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.norm = self.sketches.clip_norm_(args.max_grad_norm or math.inf)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            row = {"grad_norm": math.hypot(logs["grad_norm"], self.norm)} | (self.steps.last if self.steps else {})
            for log in (logs, state.log_history[-1]):
                log.update(row)


def equip(trainer: Trainer, control: KLControl | None = None, responses: int = 8) -> SketchCallback:
    """Make a Trainer whose optimizer is LoGRA's clip, log, resume and, with a `control`, scale its steps as it should.

    responses: rows a process that the probe examines at each step. Raises ValueError for a Trainer with another optimizer, and for settings
    under which sketches would be lost: fp16 (bf16 serves), FSDP or DeepSpeed by the Trainer, several GPUs in one process.
    """
    optimizer, args = trainer.optimizer, trainer.args
    optimizer = getattr(optimizer, "optimizer", optimizer)                  # accelerate's wrapper, in a trainer that has trained
    if not isinstance(optimizer, SketchOptimizer):
        raise ValueError(f"the Trainer's optimizer is {type(optimizer).__name__}: give it optimizers=(logra.RowAdam(sketches, ...), None)")
    for setting, where, instead in ((args.fp16, "fp16", "set bf16=True, or neither"),
                                    (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled, "FSDP or DeepSpeed",
                                     "set Sketches.shards in a loop of your own, as examples/fsdp.py does"),
                                    (args.n_gpu > 1, f"{args.n_gpu} GPUs in one process", "start one process a GPU, by torchrun or accelerate launch")):
        if setting:
            raise ValueError(f"sketches do not work under the Trainer's {where}: {instead}")
    if args.world_size > 1:
        optimizer.sketches.replicas = Replicas()
    steps = None if control is None else StepControl(trainer.model, optimizer, control, responses)
    callback = SketchCallback(optimizer.sketches, steps)
    trainer.callback_handler.callbacks.insert(0, callback)  # before those that report what is logged
    return callback

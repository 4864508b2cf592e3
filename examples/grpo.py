"""Reinforcement learning with TRL's GRPOTrainer.    python examples/grpo.py OUT    goes on from OUT's last checkpoint, if there is one"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

import logra
from logra.integrations import equip
from logra.rl.learner import BASE
from logra.rl.tasks import Sums

out = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)         # float32 weights; bf16=True computes in bfloat16
problems = [Sums().problem("train", index) for index in range(1024)]
data = Dataset.from_dict({"prompt": [p.prompt for p in problems], "answer": [p.answer for p in problems]})


def right(completions, answer, **kwargs):
    """47+85+36=132+36=168: what stands after the last = counts."""
    return [float(text.split("=")[-1] == wanted) for text, wanted in zip(completions, answer)]


sketches = logra.attach(model, rank=64, seed=1)
optimizer = logra.RowAdam(sketches, relative_step=2e-3)
args = GRPOConfig(out, max_steps=30, per_device_train_batch_size=128, num_generations=8, max_completion_length=24, max_grad_norm=1.0, bf16=False,
                  lr_scheduler_type="constant", logging_steps=1, save_steps=15, report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True)
trainer = GRPOTrainer(model, right, args, train_dataset=data, processing_class=AutoTokenizer.from_pretrained(BASE), optimizers=(optimizer, None))
equip(trainer, logra.KLControl(logra.ConstantBudget(5e-3)))                     # predicted KL of each step; clips and logs ‖S‖

trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if out.exists() else None)

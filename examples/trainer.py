"""Supervised fine-tuning with transformers' Trainer.    python examples/trainer.py OUT    goes on from OUT's last checkpoint, if there is one"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

import logra
from demonstrations import demonstration
from logra.integrations import equip
from logra.rl.learner import BASE

out = Path(sys.argv[1])
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)         # float32 weights; bf16=True below computes in bfloat16
tokenizer = AutoTokenizer.from_pretrained(BASE)

sketches = logra.attach(model, rank=64, seed=1)
optimizer = logra.RowAdam(sketches, relative_step=2e-3)
args = TrainingArguments(out, max_steps=60, per_device_train_batch_size=16, gradient_accumulation_steps=2, max_grad_norm=1.0, lr_scheduler_type="constant",
                         logging_steps=5, save_steps=30, report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True)
trainer = Trainer(model, args, train_dataset=[demonstration(tokenizer, index) for index in range(2048)],
                  data_collator=DataCollatorForSeq2Seq(tokenizer), optimizers=(optimizer, None))
equip(trainer, logra.KLControl(logra.CosineBudget(1e-2, 1e-3, updates=60)))     # scales each step, clips ‖S‖, logs it as grad_norm

trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if out.exists() else None)
logra.detach(model)                                         # a plain Hugging Face model again
model.save_pretrained(out / "model")

"""Supervised fine-tuning on several processes.    accelerate launch --multi_gpu --num_processes 2 examples/accelerated.py OUT

On CPUs as well: with --cpu accelerate starts one process alone. Each process has the whole model and its part of every batch; sketches are
averaged over them, so that all models stay the same to the bit.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import logra
from demonstrations import demonstration
from logra.rl.learner import BASE

out = Path(sys.argv[1])
accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
set_seed(0)
model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).to(accelerator.device).train()
tokenizer = AutoTokenizer.from_pretrained(BASE)

sketches = logra.attach(model, rank=64, seed=1)
if accelerator.num_processes > 1:
    sketches.replicas = logra.Replicas()                    # in the place of DDP: the model is not prepared, it has no gradient to reduce
optimizer = logra.RowAdam(sketches, relative_step=2e-3)
steps = logra.StepControl(model, optimizer, logra.KLControl(logra.ConstantBudget(5e-3)))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40 * accelerator.num_processes)      # accelerate steps it once a process
data = [demonstration(tokenizer, index) for index in range(80 * 8 * accelerator.num_processes)]
loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))
optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)

for number, batch in enumerate(loader, 1):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = sketches.clip_norm_(1.0)                 # in the place of accelerator.clip_grad_norm_
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if number % 20 == 0:
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"update {number // 2}: loss {mean:.3f}, ‖S‖ {norm:.3f}, α {steps.last['alpha']:.2f}, predicted KL {steps.last['predicted_kl']:.1e}")
accelerator.save_state(out / "state")                       # optimizer, control, schedule and generators; the weights:
torch.save(model.state_dict(), out / f"model-{accelerator.process_index}.pt")

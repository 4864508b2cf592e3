"""Supervised fine-tuning under FSDP2.    torchrun --nproc-per-node 2 examples/fsdp.py OUT

Weights, sketches and RowAdam's state are sharded by rows; no rank ever holds a d×k gradient, nor more of S than its rows and one layer's sum.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import logra
from demonstrations import demonstration
from logra.rl.learner import BASE
from logra.shards import RowShards

out = Path(sys.argv[1])
dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).to(device).train()
tokenizer = AutoTokenizer.from_pretrained(BASE)
collate = DataCollatorForSeq2Seq(tokenizer)

sketches = logra.attach(model, rank=64, seed=1)
sketches.base                                               # a hash of the whole weights, which updates carry: while they are whole
for block in model.model.layers:
    fully_shard(block)
sketches.shards = RowShards()
optimizer = logra.RowAdam(sketches, relative_step=2e-3)
steps = logra.StepControl(model, optimizer, logra.KLControl(logra.ConstantBudget(5e-3)))

for update in range(40):
    mine = range(16 * update + rank, 16 * (update + 1), ranks)              # of the update's 16 demonstrations
    batch = collate([demonstration(tokenizer, index) for index in mine]).to(device)
    loss = model(**batch).loss / ranks
    loss.backward()                                         # sketches are summed over the ranks
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach())
    if rank == 0 and update % 10 == 9:
        print(f"update {update + 1}: loss {mean:.3f}, α {steps.last['alpha']:.2f}, predicted KL {steps.last['predicted_kl']:.1e}", flush=True)

weights = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}
if rank == 0:
    out.mkdir(parents=True, exist_ok=True)
    torch.save(weights, out / "model.pt")
dist.destroy_process_group()

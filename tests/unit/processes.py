"""Ranks of a gloo group, each a real process."""

import torch
import torch.distributed as dist
from torch import multiprocessing

from logra.rl.runs import FORKED


def on_ranks(work, ranks, folder, *arguments):
    """What work(number, ranks, *arguments) returns on every rank. The processes are forked as a plan's runs are: from one that has imported what they need."""
    (folder / "store").unlink(missing_ok=True)
    multiprocessing.start_processes(_rank, (work, ranks, str(folder), arguments), nprocs=ranks, start_method=FORKED.get_start_method())
    return [torch.load(folder / str(number), weights_only=False) for number in range(ranks)]


def _rank(number, work, ranks, folder, arguments):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=number, world_size=ranks)
    torch.save(work(number, ranks, *arguments), f"{folder}/{number}")
    dist.destroy_process_group()

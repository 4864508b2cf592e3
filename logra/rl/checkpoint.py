"""Checkpoints of a run, by torch.distributed.checkpoint: each rank writes its own rows, in the background (one process: at once), for any number of ranks to read.

    checkpoint/update-000050/      *.distcp, .metadata: the tensors; rest.pt: everything else, with their names in their places

One is written beside and renamed when it is whole and on the disk, so that a folder of that name is always complete. The newest two are kept.
"""

import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from logra.rl.ranks import Alone, Ranks
from logra.rl.records import to_disk

KEPT = 2


class Checkpoints:
    """The checkpoints in one run's folder. All ranks make and use it together."""

    def __init__(self, folder: Path, ranks: Alone | Ranks):
        self.folder, self.ranks = folder / "checkpoint", ranks
        # of its own: a save talks over it from another thread, while the training goes on over the default one
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._saving: Future | None = None

    def newest(self) -> Path | None:
        found = sorted(self.folder.glob("update-*"))
        return found[-1] if found else None

    def save(self, update: int, state: dict) -> None:
        """Begin to write a state (nested, of tensors and plain values), once the one before is written. The tensors are copied before this returns.

        Raises what went wrong with the one before, on every rank.
        """
        self.wait()
        aside, whole = self.folder / f".update-{update:06d}.aside", self.folder / f"update-{update:06d}"
        tensors: dict[str, torch.Tensor] = {}
        rest = _taken_out(state, "", tensors)
        if self.ranks.number == 0:
            aside.mkdir(parents=True, exist_ok=True)
            torch.save(rest, aside / "rest.pt")
            to_disk(aside / "rest.pt")                      # dcp does so for its own files
        if self._group is None:
            with _alone():
                dcp.save(tensors, checkpoint_id=aside, no_dist=True)
            return self._count(aside, whole)
        done = self._saving = Future()                      # when the renaming is
        saving = dcp.async_save(tensors, checkpoint_id=aside, process_group=self._group)
        saving.add_done_callback(lambda saved: self._written(saved, done, aside, whole))

    def _written(self, saved: Future, done: Future, aside: Path, whole: Path) -> None:
        """In the thread that wrote: rank 0, which hears when all have, makes it count."""
        try:
            saved.result()
            if self.ranks.number == 0:
                self._count(aside, whole)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    def _count(self, aside: Path, whole: Path) -> None:
        shutil.rmtree(whole, ignore_errors=True)            # of an earlier try that was gone back on
        to_disk(aside)
        aside.rename(whole)
        to_disk(self.folder)
        for old in sorted(self.folder.glob("update-*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def wait(self) -> None:
        """Until what is being written is. Raises what went wrong with it."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.result()

    def load(self, into: dict[str, torch.Tensor]) -> dict | None:
        """The newest state, or None where there is none. Tensors whose names `into` has are read into its own, the others as `ranks.empty` makes them."""
        path = self.ranks.led(self.newest)
        if path is None:
            return None
        rest = torch.load(path / "rest.pt", weights_only=True)
        known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: into[name] if name in into else self.ranks.empty(about.size, about.properties.dtype) for name, about in known.items()}
        with _alone():
            dcp.load(tensors, checkpoint_id=path, process_group=self._group, no_dist=self._group is None)
        return _put_back(rest, tensors)


@contextmanager
def _alone() -> Iterator[None]:
    """Without the warning that a single process is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _taken_out(value, name: str, tensors: dict[str, torch.Tensor]):
    """The same nested value with {"": name} in the place of each tensor, which goes to `tensors`."""
    if isinstance(value, dict):
        return {key: _taken_out(inner, f"{name}/{key}" if name else str(key), tensors) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"": name}
    return value


def _put_back(value, tensors: dict[str, torch.Tensor]):
    if isinstance(value, dict):
        return tensors[value[""]] if value.keys() == {""} else {key: _put_back(inner, tensors) for key, inner in value.items()}
    return value

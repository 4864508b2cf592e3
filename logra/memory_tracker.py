"""Follows every tensor storage of a step, real or fake, by category: PyTorch's MemTracker with the categories of a sketched step.

A storage belongs to the category of the code that made it, until something better is known: what autograd saves becomes an activation.
Under fake tensors (`FakeTensorMode`) no number is computed, so that a step of any size runs on any machine; sizes and lifetimes are real.
"""

from collections.abc import Iterable
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra.memory_setting import Category


_REAL = 1 << 18                                             # under fake tensors, indices and masks up to this size are computed in truth


class Tracker(MemTracker):
    """Enter it inside the FakeTensorMode, if there is one. `vocabulary` tells logits by their last axis.

    trace: (phase, bytes of each category in their order) after every operator that changed them. Phases are what `phase` names.
    marks: (row of the trace, what begins there, layer), see `mark`.
    """

    def __init__(self, vocabulary: int):
        super().__init__()
        self._ref_class = Category
        self.vocabulary, self.trace, self.marks = vocabulary, [], []
        self._phase, self._making, self._last = "", None, None

    def __enter__(self):
        self._track_resize()                                # FSDP frees gathered weights by resizing their storage to nothing
        return TorchDispatchMode.__enter__(self)

    def __exit__(self, *exception):
        self._restore_resize()
        return TorchDispatchMode.__exit__(self, *exception)

    @contextmanager
    def phase(self, name: str):
        self._phase, before = name, self._phase
        self._last = None
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def making(self, category: Category):
        """What is made within belongs to `category`; the outermost says which, except that projections are always projections."""
        before = self._making
        self._making = category if before is None or category is Category.PROJECTIONS else before
        try:
            yield
        finally:
            self._making = before

    def mark(self, kind: str, layer: int) -> None:
        """Says that with the next operator a decoder layer's `kind` begins (`memory_depth.Piece`)."""
        self.marks.append((len(self.trace), kind, layer))

    def label(self, tensors: Iterable[torch.Tensor], category: Category) -> None:
        for tensor in tensors:
            if not _owns_nothing(tensor):
                self._update_and_maybe_create_winfos(tensor, category)

    def saving(self):
        """A context in which what autograd saves is labelled as activations, unless it is something better known."""
        def pack(tensor):
            if not _owns_nothing(tensor) and not isinstance(tensor, DTensor):
                known, _ = self._WINFO.get(tensor.untyped_storage(), (None, None))
                if known is None or known.reftype is Category.TEMPORARIES:
                    self._update_and_maybe_create_winfos(tensor, Category.ACTIVATIONS)
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)

    def totals(self) -> tuple[int, ...]:
        snapshots = self._curr_mem_snap.values()
        return tuple(sum(by.get(category, 0) for by in snapshots) for category in Category)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented                           # its local operators come by themselves
        out = _run(func, args, kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and not _owns_nothing(leaf):
                self._track(self._category(leaf), leaf)
        now = self.totals()
        if now != self._last:
            self._last = now
            self.trace.append((self._phase, now))
        return out

    def _category(self, tensor) -> Category:
        if self._making is not None and self._making is not Category.PROBE:
            return self._making
        if tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary:
            return Category.LOGITS
        if self._making is not None:
            return self._making
        recomputing = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        return Category.ACTIVATIONS if recomputing else Category.TEMPORARIES


def _owns_nothing(tensor: torch.Tensor) -> bool:
    """Forward AD's zeros own no memory, whatever their size says."""
    return tensor._is_zerotensor() or tensor.layout != torch.strided


def _run(func, args, kwargs):
    """An operator, under fake tensors with the two things they cannot do: indices have values, and a number that is asked for is one.

    Indices, masks and lengths stay real, so that what depends on them has its true shape. A float that code asks for is 1, a truth is true.
    """
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if fake is None:
        return func(*args, **kwargs)
    if func is torch.ops._c10d_functional.wait_tensor.default:
        func(*args, **kwargs)
        return args[0]                                      # its fake makes a copy, which the real one does not
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
        small = all(tensor.numel() <= _REAL for tensor in tensors)
        dtype = kwargs.get("dtype")
        whole = not dtype.is_floating_point if dtype else func in _INDEX_MAKERS or bool(tensors)
        if small and whole and all(not tensor.is_floating_point() for tensor in tensors):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
    if func in _INDEXED:
        args = (args[0], _numbered(args[1]), *args[2:])
    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        if func is not torch.ops.aten._local_scalar_dense.default:
            raise
        return True if args[0].dtype == torch.bool else 1.0 if args[0].dtype.is_floating_point else 1


def _numbered(indices):
    """Masks as the places where they are true: a fake tensor cannot be indexed by a mask."""
    found = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}
_INDEX_MAKERS = {torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step}

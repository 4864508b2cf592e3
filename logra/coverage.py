"""Which modules of a model are sketched, which are left out, and why."""

from typing import NamedTuple

from torch import nn

from logra.projection import canonical_name


class CoverageRow(NamedTuple):
    name: str
    kind: str                                               # the module's class
    shape: tuple
    sketched: bool
    why: str                                                # why it was left out; empty if it was not


class Coverage(list):
    """A row for each module that holds a matrix: which ones are sketched, which are left out, and why."""

    def __str__(self):
        taken = sum(row.sketched for row in self)
        lines = [f"{taken} of {len(self)} matrices are sketched"]
        width = max((len(row.name) for row in self), default=0)
        lines += [f"{row.name:<{width}}  {row.kind:<16} {'×'.join(map(str, row.shape)):>14}  "
                  f"{'sketched' if row.sketched else row.why}" for row in self]
        return "\n".join(lines)


def choose(model, rank: int, wanted: set[str] | None) -> tuple[dict[str, nn.Linear], Coverage]:
    """The modules to sketch, by canonical name, and the table of all. wanted: None for the decoder's projections, or the names to take."""
    inner = next((module for module in model.modules() if hasattr(module, "get_decoder")), model)    # without its wrappers
    blocks = decoder_blocks(model, inner)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    chosen, coverage = {}, Coverage()
    for full, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            name = canonical_name(full if part == "weight" else f"{full}.{part}")
            why = _why_not(module, full, blocks, head, rank) if wanted is None else _why_not_named(module, name, wanted)
            coverage.append(CoverageRow(name, type(module).__name__, tuple(parameter.shape), not why, why))
            if not why:
                chosen[name] = module
    if wanted is not None and set(chosen) != wanted:
        raise ValueError(f"modules names {sorted(wanted - set(chosen))[:5]}, which are no nn.Linear modules of this "
                         f"{type(model).__name__}:\n{coverage}")
    if not chosen:
        raise ValueError(f"no module of this {type(model).__name__} can be sketched at rank {rank}; "
                         f"name nn.Linear modules with modules=[...]:\n{coverage}")
    return chosen, coverage


def decoder_blocks(model, inner) -> dict[str, nn.Module]:
    """The repeated blocks: the entries of the outermost nn.ModuleList of the (text) decoder, by their full names."""
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    inside = {id(module) for module in decoder.modules()}
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and id(module) in inside]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    return {f"{name}.{i}": block for name in outermost for i, block in enumerate(model.get_submodule(name))}


def _why_not(module, name, blocks, head, rank) -> str:
    if module is head:
        return "output head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    block = next((b for b in blocks if name.startswith(b + ".")), None)
    if block is None:
        return "outside the decoder's blocks"
    if type(module) is not nn.Linear:
        return f"not an nn.Linear ({type(module).__name__})"
    parent = name.rpartition(".")[0]
    if parent == block:
        return "not part of an attention or MLP module"
    if hasattr(blocks[block].get_submodule(parent[len(block) + 1:]), "experts"):
        return "a router of experts"
    if min(module.weight.shape) <= rank:
        return f"min(d, k) = {min(module.weight.shape)} is not above the rank {rank}"
    return ""


def _why_not_named(module, name, wanted) -> str:
    if name not in wanted:
        return "not named"
    return "" if type(module) is nn.Linear else f"not an nn.Linear ({type(module).__name__})"

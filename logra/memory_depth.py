"""A step's peaks at any depth from traces of two shallow models: every moment of a layer is followed there, not the highest moment alone.

A decoder's layers are alike: a layer's forward, its recomputation and its backward move the same bytes at any depth, on top of what
the others hold by then, which grows evenly from layer to layer. So each moment of a layer lies on a line over depth, the layer counted
from the first or from the last, and between the two the moments of the layers between. A line through highest moments alone would lie
too low: where memory grows faster in one moment than in another, it overtakes the other in a deeper model than the two that were run.
"""

from collections import Counter
from typing import NamedTuple

Sizes = tuple[int, ...]                                     # bytes of each category


class Piece(NamedTuple):
    """A stretch of a trace. kind: "forward" or "backward" of a decoder layer, "after" its forward, or "around" (layer is None): what no layer is known for.

    time: how often such a stretch of this phase and layer came before. A layer's backward begins with its recomputation, if there is one."""

    phase: str
    kind: str
    layer: int | None
    time: int


def shallow(period: int) -> int:
    """Layers of the shallower model where kinds of layers repeat after `period`: one of every kind between edges of two layers."""
    return period * -(-(period + 4) // period)


def pieces(trace: list[tuple[str, Sizes]], marks: list[tuple[int, str, int]]) -> dict[Piece, list[Sizes]]:
    """A trace cut where marks (row, kind, layer) say that a layer begins or ends, and between phases."""
    begins = {row: (kind, layer) for row, kind, layer in marks}         # of those at one row, the last
    found, times, phase = {}, Counter(), None
    for row, (at, sizes) in enumerate(trace):
        if row in begins or at != phase:
            phase = at
            name = (phase, *begins.get(row, ("around", None)))
            rows = found[Piece(*name, times[name])] = []
            times[name] += 1
        rows.append(sizes)
    return found


def at_depth(first: dict[Piece, list[Sizes]], second: dict[Piece, list[Sizes]], layers: int, period: int, more: int) -> dict[str, Sizes] | None:
    """The highest moment of each phase, `more` periods deeper than `first`. None if a layer does not do the same in both: deeper ones have wider edges.

    first, second: the pieces of models of `layers` and `layers + period`. Pieces of no layer, such as the update's loops over all matrices, grow by what
    they keep of each and are highest at one end of it: there the line goes through their highest moments.
    """
    highest = {}
    for piece, rows in first.items():
        own = piece.layer is not None
        for name in _deeper(piece, layers, period):
            same = second.get(name)
            if same is None or own and _moves(rows) != _moves(same):
                return None
            top = _highest(rows)
            line = tuple(size + more * (deeper - size) for size, deeper in zip(rows[top], same[top if own else _highest(same)]))
            if piece.phase not in highest or sum(line) > sum(highest[piece.phase]):
                highest[piece.phase] = line
    return highest


def _deeper(piece: Piece, layers: int, period: int) -> list[Piece]:
    """The same piece in the deeper model: its layer counted from the first, unless it is at the last edge, and from the last, unless it is at the first.

    Layers at an edge do what others do not: FSDP frees in another order with nothing before them, and the first of its kind saves what all share.
    """
    if piece.layer is None:
        return [piece]
    edge = (layers - period) // 2
    return [piece] * (piece.layer < layers - edge) + [piece._replace(layer=piece.layer + period)] * (piece.layer >= edge)


def _highest(rows: list[Sizes]) -> int:
    return max(range(len(rows)), key=lambda row: sum(rows[row]))


def _moves(rows: list[Sizes] | None) -> list[Sizes] | None:
    """Rows against the first of them."""
    return rows and [tuple(size - before for size, before in zip(row, rows[0])) for row in rows]

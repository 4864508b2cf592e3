"""The highest moment of a deep model is found from two shallow ones, whichever moment it is there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logra import memory_depth
from logra.memory_depth import Piece

BYTES = st.integers(0, 50)
SIZES = st.tuples(BYTES, BYTES)
MOVES = st.lists(SIZES, min_size=1, max_size=3)
ODD = st.lists(st.tuples(st.integers(0, 400), BYTES), min_size=1, max_size=2)           # so much that it is the highest of shallow models, and not of deep ones


@st.composite
def decoders(draw):
    """A function layers -> (trace, marks) of a made-up training step: what a layer holds for good, its forward for its backward, and both for a moment."""
    period = draw(st.sampled_from([1, 2, 4]))
    kinds = [dict(weights=draw(SIZES), kept=draw(SIZES), gradients=draw(SIZES), forward=draw(MOVES), backward=draw(MOVES)) for _ in range(period)]
    first, last, loss, update = draw(ODD), draw(ODD), draw(ODD), draw(SIZES)

    def run(layers):
        trace, marks = [], []
        held = [sum(kinds[i % period]["weights"][c] for i in range(layers)) for c in range(2)]

        def rows(phase, moves):
            trace.extend((phase, tuple(h + m for h, m in zip(held, move))) for move in moves)

        def change(by, sign=1):
            held[:] = [h + sign * b for h, b in zip(held, by)]

        for i in range(layers):
            marks.append((len(trace), "forward", i))
            rows("train", kinds[i % period]["forward"] + (first if i < 2 else last if i >= layers - 2 else []))
            change(kinds[i % period]["kept"])
            marks.append((len(trace), "after", i))
            rows("train", loss if i == layers - 1 else [(0, 0)])
        for i in reversed(range(layers)):
            marks.append((len(trace), "backward", i))
            rows("train", kinds[i % period]["backward"] + (first if i < 2 else last if i >= layers - 2 else []))
            change(kinds[i % period]["kept"], -1)
            change(kinds[i % period]["gradients"])
        for _ in range(layers):
            change(update)
            rows("update", [(0, 0)])
        return trace, marks

    return period, run


@given(decoders(), st.integers(1, 9))
def test_the_highest_moment_at_any_depth_is_the_whole_models(decoder, more):
    period, run = decoder
    layers = memory_depth.shallow(period)
    first, second = (memory_depth.pieces(*run(n)) for n in (layers, layers + period))
    found = memory_depth.at_depth(first, second, layers, period, more)
    trace, _ = run(layers + more * period)
    for phase in ("train", "update"):
        assert sum(found[phase]) == max(sum(sizes) for at, sizes in trace if at == phase)
        assert found[phase] in [sizes for at, sizes in trace if at == phase]


@pytest.mark.parametrize("layer", range(6))
def test_a_layer_that_does_something_else_in_the_deeper_model_is_seen(layer):
    def moments(layers, odd=None):
        return {Piece("train", "forward", i, 0): [(i, 0), (i + 5, 2)] + [(i + 1, 0)] * (i == odd) for i in range(layers)}

    assert memory_depth.at_depth(moments(5), moments(6), 5, 1, 3) == {"train": (12, 2)}
    assert memory_depth.at_depth(moments(5), moments(6, layer), 5, 1, 3) is None

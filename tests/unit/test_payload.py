"""What synchronisation sends, at the shapes of the paper's models."""

from logra.paper import payload


def test_a_message_is_the_small_part_of_the_weights_that_is_promised():
    full = 2 * sum(d * k for d, k in payload.matrices("7B").values())
    assert len(payload.matrices("7B")) == 28 * 7 and len(payload.matrices("27B")) == 16 * 7 + 48 * 6
    assert full / payload.message_bytes("7B", 256, 8) >= 35 and full / payload.message_bytes("7B", 64, 8) >= 140

"""The record of runs that every kind of receiver followed for 1,000 updates: whole, exact, and able to say otherwise."""

import json

import pytest

from logra import sync
from logra.paper import drift
from logra.rl.train import Trainer


def test_the_record_has_every_combination_and_no_bit_differs():
    rows = drift.recorded()
    assert len(rows) == 12 and set(zip(rows["projection"], rows["bits"], rows["rank"])) == set(drift.GRID)
    assert (rows["update"] == 1000).all() and (rows["moved"] == 1000).all() and (rows["changed"] > 0).all()
    assert (rows[[f"differing_{name}" for name in drift.EXACT]] == 0).all(axis=None)
    assert (rows["differing_lossy"] > rows["entries"] / 10).all()            # the same count, of a copy that is not exact
    assert all(row.startswith("python -m logra.paper.drift --updates 1000") for row in rows["command"]) and (rows["seconds"] > 0).all()


@pytest.mark.parametrize("name", drift.EXACT)
def test_a_record_with_one_differing_entry_or_a_receiver_missing_is_not_exact(name):
    row = json.loads((drift.RECORDED / "rademacher-8bit-r16.json").read_text())
    assert drift.exact(row)
    assert not drift.exact(row | {f"differing_{name}": 1.0})
    assert not drift.exact({key: value for key, value in row.items() if key != f"differing_{name}"})


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_that_an_update_has_not_reached_are_counted(ranks):
    trainer = Trainer(drift.config(updates=2))
    slices = drift.Sliced(trainer.model, list(trainer.method.sketches), ranks)
    slices.apply(sync.full_weights(trainer.model))
    trainer.step()
    behind, entries = slices.compare(sync.full_weights(trainer.model))
    assert behind > entries / 10
    slices.apply(trainer.method.applied.to_bytes())
    assert slices.compare(sync.full_weights(trainer.model)) == (0, entries)

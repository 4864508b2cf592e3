"""What rounding the factor costs, measured along a run, and when two groups of runs are called distinguishable."""

import pandas as pd
import pytest

from logra.paper import rounding
from logra.rl.config import RunConfig
from logra.rl.train import Trainer


def test_the_shares_are_of_the_runs_own_updates_and_measuring_changes_none_of_them(monkeypatch):
    run = RunConfig(prompts=8, micro_batch=8, max_new_tokens=6, updates=3, relative_step=1e-3, incorrect_reward=-0.5)
    rows, step = [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda trainer: rows.append(step(trainer)))
    shares = rounding.shares(run, 3)
    monkeypatch.undo()
    plain = Trainer(run)
    assert [plain.step() for _ in range(3)] == rows
    assert shares["update"].tolist() == [1, 1, 2, 2, 3, 3]
    eight, sixteen = (shares[shares["bits"] == bits]["share"] for bits in (8, 16))
    assert eight.between(2e-3, 2e-2).all()                  # a row's peak is a few of its standard deviations, in 127 steps
    assert (eight.to_numpy() / sixteen.to_numpy() == pytest.approx(257, rel=0.1))


def test_runs_that_are_not_rounded_take_the_step_that_was_proposed():
    run = dict(prompts=8, micro_batch=8, max_new_tokens=6, updates=3, relative_step=1e-3, incorrect_reward=-0.5)
    rounded, exact = (Trainer(RunConfig(**run, bits=bits)) for bits in (8, None))
    one, two = rounded.step(), exact.step()
    assert one["predicted_kl"] == two["predicted_kl"] and one["realised_kl"] != two["realised_kl"]
    assert one["realised_kl"] == pytest.approx(two["realised_kl"], rel=0.05)


def test_a_difference_beyond_its_interval_is_told_from_one_within():
    finals = pd.DataFrame({"8 bits": [0.90, 0.91, 0.92], "16 bits": [0.80, 0.81, 0.80], "not rounded": [0.91, 0.90, 0.93]})
    compared = rounding.compare(finals).set_index("factor")
    assert compared["distinguishable"].to_dict() == {"8 bits": False, "16 bits": True}
    assert compared.loc["16 bits", "difference"] == pytest.approx(-0.11)
    assert not rounding.compare(finals.head(1))["distinguishable"].any()

"""The measurement behind Figure 5(b, c): cosines equal to their definition, and real policy gradients handled honestly."""

import copy

import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from logra import projection
from logra.paper import reconstruction
from logra.paper.reconstruction import CONDITIONS, DigitSums, Settings
from logra.rl import learner, rollout

RANKS = (4, 16, 64)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("d, k", [(40, 96), (160, 96)])                     # wide, and tall: the latter is made compact by QR
def test_the_fast_cosine_is_the_definition_in_float64(condition, d, k):
    generator = torch.Generator().manual_seed(1)
    G_dk = torch.randn(d, 3, generator=generator) @ torch.randn(3, k, generator=generator) + 0.1 * torch.randn(d, k, generator=generator)
    table = reconstruction.compare("a", reconstruction.compact(1e-7 * G_dk), [condition], 5, RANKS, seeds=2)
    assert len(table) == 2 * len(RANKS)
    for row in table.itertuples():
        update = 0 if condition == "fixed" else 5
        A_rk = projection.matrix(CONDITIONS[condition], row.rank, k, projection.key(row.projection_seed, update, "a"), dtype=torch.float64)
        Ghat_dk = G_dk.double() @ A_rk.T @ A_rk
        wanted = (G_dk * Ghat_dk).sum() / (G_dk.double().norm() * Ghat_dk.norm())
        assert row.cosine == pytest.approx(wanted.item(), abs=2e-6)


def test_a_fixed_projection_stays_and_a_refreshed_one_changes_with_the_minibatch():
    R_dk = reconstruction.compact(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)))
    first, second = (reconstruction.compare("a", R_dk, CONDITIONS, minibatch, RANKS, seeds=2) for minibatch in (1, 2))
    same = (first["cosine"].to_numpy() == second["cosine"].to_numpy())
    assert same[first["condition"] == "fixed"].all()
    assert not same[(first["condition"] != "fixed").to_numpy()].any()
    values = first[first["rank"] == 4].pivot(index="condition", columns="projection_seed", values="cosine")
    assert values.stack().nunique() == values.size                          # no condition shares its draws with another


def test_a_zero_gradient_has_no_cosine_and_says_so():
    with pytest.raises(ValueError, match="norm 0.0"):
        reconstruction.compact(torch.zeros(3, 4))


def test_concentration_counts_outer_products_and_columns():
    one = torch.zeros(6, 8)
    one[:, 3] = 2.0
    assert reconstruction.concentration(reconstruction.compact(one)) == pytest.approx({"effective_rank": 1.0, "diagonal": 1.0})
    even = reconstruction.compact(torch.eye(8))
    assert reconstruction.concentration(even) == pytest.approx({"effective_rank": 8.0, "diagonal": 1 / 8})


def tiny():
    """A random Llama over the character tokenizer: real layers, real names, no ability."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), learner.tokenizer()


def test_the_gradient_is_that_of_the_policy_loss_whatever_the_micro_batch():
    model, tokenizer = tiny()
    sampled = rollout.generate(model, tokenizer, ["1+1=", "What is 20 + 3?", "7"], seed=4, max_new_tokens=6)
    advantage_b = torch.tensor([1.0, -0.5, 0.25])
    gradients = []
    for micro_batch in (1, 3):
        copied = copy.deepcopy(model)
        reconstruction.add_gradients(copied, sampled, advantage_b, micro_batch)
        gradients.append(copied.model.layers[1].mlp.down_proj.weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-8)
    # By hand: one response at a time, straight from the logits.
    double = copy.deepcopy(model).double()
    total = 0.0
    for row in range(3):
        length = int(sampled.attention_mask[row].sum())
        ids_bt = sampled.input_ids[row:row + 1, :length]
        logprob_t = double(ids_bt).logits.log_softmax(-1)[0, :-1].gather(1, ids_bt[0, 1:, None])[:, 0]
        total = total - advantage_b[row].double() * logprob_t[sampled.response_mask[row, 1:length]].sum()
    (total / sampled.response_mask.sum()).backward()
    torch.testing.assert_close(gradients[0].double(), double.model.layers[1].mlp.down_proj.weight.grad, rtol=1e-4, atol=1e-7)


class Scripted(DigitSums):
    """Verdicts by the prompt's index: the first minibatch all wrong, then every other response right."""

    responses = 4

    def verify(self, response, problem):
        return float(problem.index >= self.responses and problem.index % 2)


def test_a_minibatch_without_a_gradient_is_reported_and_replaced(monkeypatch):
    monkeypatch.setattr(reconstruction.models, "load", lambda name: tiny())
    monkeypatch.setattr(reconstruction, "DigitSums", Scripted)
    settings = Settings(minibatches=2, responses=4, max_new_tokens=4, ranks=(2, 8), projection_seeds=3, micro_batch=2)
    cosines, gradients, responses = reconstruction.measure(settings, progress=False)
    assert responses.groupby("draw")["used"].all().tolist() == [False, True, True]
    assert sorted(cosines["minibatch"].unique()) == [1, 2]
    assert len(cosines) == 2 * 7 * 2 * len(CONDITIONS) * 2 * 3 and len(gradients) == 2 * 7 * 2
    assert cosines["cosine"].between(0, 1, inclusive="neither").all()
    again, _, _ = reconstruction.measure(settings, progress=False)
    pd.testing.assert_frame_equal(cosines, again, check_exact=True)

    cells = reconstruction.cells(cosines, gradients)
    assert len(cells) == 2 * len(CONDITIONS) * 2
    one = cosines.query("condition == 'gaussian' and rank == 8 and layer == 1")["cosine"]
    cell = cells.query("condition == 'gaussian' and rank == 8 and layer == 1").iloc[0]
    assert cell["measured"] == pytest.approx(one.mean())
    assert (cells["with_gradient"] < cells["closed_form"]).all()


def test_a_model_that_is_never_right_is_an_error_and_not_a_figure(monkeypatch):
    monkeypatch.setattr(reconstruction.models, "load", lambda name: tiny())
    with pytest.raises(RuntimeError, match="rewards that differ"):
        reconstruction.measure(Settings(minibatches=1, responses=2, max_new_tokens=1), progress=False)


def test_the_papers_cosines_follow_from_the_shapes_of_its_model_alone():
    signs = {rank: reconstruction.closed_form(reconstruction.QWEN_SHAPES, "rademacher", rank) for rank in (4, 16, 64, 256)}
    gaussian = {rank: reconstruction.closed_form(reconstruction.QWEN_SHAPES, "gaussian", rank) for rank in signs}
    assert signs[256] == pytest.approx(0.348, abs=5e-4)                     # as printed, three digits
    assert signs[4] == pytest.approx(0.046, abs=1e-3)                       # "approximately 0.046"
    assert all(0 < signs[rank] - gaussian[rank] < 2e-4 for rank in (64, 256))
    assert len(reconstruction.QWEN_SHAPES) * reconstruction.QWEN_LAYERS == 196

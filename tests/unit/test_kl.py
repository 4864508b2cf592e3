"""Predicted-KL control: Eq. 5, 6, 7, 16 and 17 against float64 references, and what the probe leaves as it was."""

import copy
import functools
import inspect
import math
import sys
from types import SimpleNamespace

import models
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import logra
from logra import attention, kl


def prepared(build=models.qwen2, rank=16, relative_step=1e-2, b=3, t=24, **settings):
    """A model with a proposal from a real backward, and contexts with 10 examined places a row or fewer."""
    model = build(**settings)
    sketches = logra.attach(model, rank, seed=7)
    input_ids = models.ids(b, t, seed=1)
    models.loss(model, input_ids).backward()
    optimizer = logra.RowAdam(sketches, relative_step=relative_step)
    lengths = torch.arange(t, t - 3 * b, -3)                # right-padded, every row another length
    mask = torch.arange(t) < lengths[:, None]
    response = (torch.arange(t) >= 8) & mask
    return model, optimizer, logra.Contexts.of_responses(input_ids * mask, mask.long(), response)


def reference(model, proposal, contexts, temperature=1.0, alphas=()):
    """q of Eq. 6 by torch.func.jvp on dense float64 weights, and the KL of Eq. 5 at each α."""
    sketches = kl.attached(model)
    D = {f"{name}.weight": -proposal.eta * U_dr.double() @ sketches[name].A_rk(dtype=torch.float64) for name, U_dr in proposal.items()}
    exact = copy.deepcopy(model).double()
    logra.detach(exact)
    W = {name: exact.get_parameter(name).detach() for name in D}

    def logits(weights):
        inputs = dict(input_ids=contexts.input_ids, attention_mask=contexts.attention_mask, use_cache=False)
        return torch.func.functional_call(exact, weights, (), inputs).logits[contexts.predictions]

    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        z, rate = torch.func.jvp(logits, (W,), (D,))
        p = torch.softmax(z / temperature, -1)
        variance = (p * rate.square()).sum(-1) - (p * rate).sum(-1).square()
        log_p, kls = torch.log_softmax(z / temperature, -1), []
        for alpha in alphas:
            log_q = torch.log_softmax(logits({name: W[name] + alpha * D[name] for name in D}) / temperature, -1)
            kls.append(float((log_p.exp() * (log_p - log_q)).sum(-1).mean()))
    return float(variance.mean()) / (2 * temperature**2), kls


@pytest.mark.parametrize("build", [models.qwen2, models.llama, models.qwen3_5, models.qwen3_5_with_vision, models.gemma2])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_probe_is_equation_6_and_the_realised_kl_is_that_of_the_dense_weights(build, temperature):
    model, optimizer, contexts = prepared(build)
    proposal = optimizer.propose()
    q, kls = reference(model, proposal, contexts, temperature, alphas=(1.0, -0.5))
    assert logra.predicted_kl(model, proposal, contexts, temperature=temperature) == pytest.approx(q, rel=1e-4)
    for alpha, expected in zip((1.0, -0.5), kls):
        assert logra.realised_kl(model, proposal, contexts, alpha, temperature) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("relative_step", [1e-3, 1e-1], ids=["nominal", "beyond the quadratic"])
def test_finite_differences_agree_within_a_percent_at_any_size_of_the_proposal(relative_step):
    model, optimizer, contexts = prepared(relative_step=relative_step)
    proposal = optimizer.propose()
    exact = logra.predicted_kl(model, proposal, contexts)
    assert logra.predicted_kl(model, proposal, contexts, "finite_difference") == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("value,method", [(math.nan, "jvp"), (math.inf, "jvp"), (1e30, "jvp"),
                                          (math.nan, "finite_difference"), (math.inf, "finite_difference")])
def test_a_proposal_that_is_not_finite_ends_in_an_error_and_not_in_a_step(value, method):
    model, optimizer, contexts = prepared()
    proposal = dict(optimizer.propose())
    proposal["model.layers.2.mlp.down_proj"][:] = value
    with pytest.raises(FloatingPointError, match="predicted KL is"):
        logra.KLControl(logra.ConstantBudget(1e-4), method=method).scale(model, proposal, contexts)


def test_the_kl_over_its_prediction_goes_to_one_with_the_scale_itself():
    model, optimizer, contexts = prepared()
    proposal = optimizer.propose()
    model.double()                                          # float32 logits would end the decades at a KL near 1e-9
    q = logra.predicted_kl(model, proposal, contexts)
    error = [abs(logra.realised_kl(model, proposal, contexts, alpha) / (alpha**2 * q) - 1) for alpha in (1, 0.1, 0.01, 0.001)]
    assert all(b < a / 7 for a, b in zip(error, error[1:])) and error[-1] < 1e-4         # Eq. 11: the remainder is O(α³)


def test_the_prediction_holds_on_a_pretrained_model_at_the_papers_step():
    from logra.rl import models as pretrained

    model, tokenizer = pretrained.load(pretrained.SMOLLM2)
    text = "The capital of France is Paris, and the sum of 17 and 25 is 42. A train leaves the station at nine and arrives at noon."
    input_ids = tokenizer(text, return_tensors="pt").input_ids
    sketches = logra.attach(model, 16)
    models.loss(model, input_ids).backward()
    proposal = logra.RowAdam(sketches, relative_step=6e-5).propose()
    contexts = logra.Contexts(input_ids, torch.ones_like(input_ids), torch.arange(input_ids.shape[1])[None] >= 16)
    q = logra.predicted_kl(model, proposal, contexts)
    realised = {alpha: logra.realised_kl(model, proposal, contexts, alpha) for alpha in (4, 2, 1, 0.5, 0.1)}
    error = {alpha: abs(kl / (alpha**2 * q) - 1) for alpha, kl in realised.items()}
    assert error[4] > error[2] > error[1] and max(error[1], error[0.5], error[0.1]) < 0.01
    assert realised[1] / realised[0.5] == pytest.approx(4, rel=0.05)                      # half the scale, a quarter of the KL
    assert logra.predicted_kl(model, proposal, contexts, "finite_difference") == pytest.approx(q, rel=0.02)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 130])
def test_no_prediction_is_lost_between_chunks_of_tokens(n, monkeypatch):
    model, optimizer, contexts = prepared(b=1, t=140)
    contexts = logra.Contexts(contexts.input_ids, contexts.attention_mask, (torch.arange(140) < n)[None])
    proposal = optimizer.propose()
    measures = (logra.predicted_kl, logra.realised_kl, lambda *args: logra.predicted_kl(*args, method="finite_difference"))
    chunked = [measure(model, proposal, contexts) for measure in measures]
    monkeypatch.setattr(kl, "_CHUNK", 1 << 20)
    assert [measure(model, proposal, contexts) for measure in measures] == pytest.approx(chunked, rel=1e-5)


def test_a_padded_batch_equals_its_rows_done_singly():
    model, optimizer, contexts = prepared()
    proposal, lengths = optimizer.propose(), contexts.attention_mask.sum(1).tolist()
    for measure in (logra.predicted_kl, logra.realised_kl):
        single = []
        for i, n in enumerate(lengths):
            row = logra.Contexts(*(tensor[i:i + 1, :n] for tensor in (contexts.input_ids, contexts.attention_mask, contexts.predictions)))
            single.append((measure(model, proposal, row), int(row.predictions.sum())))
        mean = sum(value * count for value, count in single) / sum(count for _, count in single)
        assert measure(model, proposal, contexts) == pytest.approx(mean, rel=1e-4)


def test_responses_are_shifted_to_the_places_that_predict_them():
    response = torch.tensor([[0, 0, 1, 1, 0], [1, 0, 0, 0, 1]])
    contexts = logra.Contexts.of_responses(torch.zeros_like(response), torch.ones_like(response), response)
    assert contexts.predictions.tolist() == [[False, True, True, False, False], [False, False, False, True, False]]


def test_the_probe_changes_nothing_of_the_model_also_after_an_exception(monkeypatch):
    model, optimizer, contexts = prepared(attention_dropout=0.5, _attn_implementation="sdpa")
    model.train()
    model.model.layers[1].eval()                            # each module's own mode
    modes = {name: module.training for name, module in model.named_modules()}
    state, sdpa = copy.deepcopy(model.state_dict()), torch.backends.cuda.flash_sdp_enabled()
    proposal, calls = optimizer.propose(), []
    q = logra.predicted_kl(model, proposal, contexts)
    assert q == logra.predicted_kl(model, proposal, contexts)                             # no dropout: twice the same
    monkeypatch.setattr(model.model.norm, "forward", lambda *_: calls.append(1) or (_ for _ in ()).throw(KeyError("within")))
    for method in ("jvp", "finite_difference"):
        with pytest.raises(KeyError, match="within"):
            logra.predicted_kl(model, proposal, contexts, method)
    monkeypatch.undo()
    assert len(calls) == 2 and torch.backends.cuda.flash_sdp_enabled() == sdpa
    assert {name: module.training for name, module in model.named_modules()} == modes and torch.is_grad_enabled()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(sketch.delta is None for sketch in optimizer.sketches.values())
    assert logra.predicted_kl(model, proposal, contexts) == q


def test_the_primal_of_the_dual_forward_is_the_forward_to_the_bit(monkeypatch):
    model, optimizer, contexts = prepared()
    seen = []
    unpack = kl.forward_ad.unpack_dual
    monkeypatch.setattr(kl.forward_ad, "unpack_dual", lambda h: seen.append(unpack(h)) or seen[-1])
    logra.predicted_kl(model, optimizer.propose(), contexts)
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        plain = model.model(input_ids=contexts.input_ids, attention_mask=contexts.attention_mask).last_hidden_state
    assert torch.equal(seen[0].primal, plain[contexts.predictions]) and seen[0].tangent.any()


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
def test_a_probe_of_beginnings_is_the_mean_over_their_predictions_in_whole_responses(method):
    model, optimizer, contexts = prepared()
    proposal, kept = optimizer.propose(), contexts.predictions.clone()
    kept[:, 14:] = False
    short = contexts.beginning(14)
    assert short.input_ids.shape[1] == 14 and 0 < short.predictions.sum() == kept.sum() < contexts.predictions.sum()
    whole = logra.predicted_kl(model, proposal, logra.Contexts(contexts.input_ids, contexts.attention_mask, kept), method)
    assert logra.predicted_kl(model, proposal, short, method) == pytest.approx(whole, rel=1e-4) != pytest.approx(logra.predicted_kl(model, proposal, contexts, method), rel=1e-3)
    assert contexts.beginning(None) is contexts


def test_other_attention_is_set_aside_in_the_probe_and_comes_back():
    model, optimizer, contexts = prepared()
    proposal = optimizer.propose()
    q = logra.predicted_kl(model, proposal, contexts)
    model.set_attn_implementation("flex_attention")         # drops tangents without a word
    assert logra.predicted_kl(model, proposal, contexts) == pytest.approx(q, rel=1e-4)
    assert model.config._attn_implementation == "flex_attention"


def test_kernels_of_linear_attention_without_forward_ad_are_set_aside_in_the_probe_and_come_back(monkeypatch):
    model, optimizer, contexts = prepared(models.qwen3_5)
    proposal, home = optimizer.propose(), sys.modules[type(model).__module__]
    q, used = logra.predicted_kl(model, proposal, contexts), []
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        plain = inspect.unwrap(getattr(home, name))

        class Kernel(torch.autograd.Function):              # as fla's: with a backward, and no forward AD
            @staticmethod
            def forward(ctx, plain, inputs, settings):
                used.append(plain)
                return plain(*inputs, **settings)

        monkeypatch.setattr(home, name, functools.wraps(plain)(lambda *inputs, plain=plain, **settings: Kernel.apply(plain, inputs, settings)))
    kernels = home.torch_chunk_gated_delta_rule, home.causal_conv1d_fn
    assert logra.predicted_kl(model, proposal, contexts) == q and not used
    assert (home.torch_chunk_gated_delta_rule, home.causal_conv1d_fn) == kernels
    assert logra.predicted_kl(model, proposal, contexts, "finite_difference") == pytest.approx(q, rel=1e-2) and len(set(used)) == 2


def test_a_compiled_layer_is_not_compiled_in_the_probe():
    model, optimizer, contexts = prepared()
    proposal, compiled = optimizer.propose(), []
    q = logra.predicted_kl(model, proposal, contexts)
    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for layer in model.model.layers:                        # inductor's graphs would lose the tangents: q = 0
        layer.compile(backend=backend)
    assert logra.predicted_kl(torch.compile(model, backend=backend), proposal, contexts) == q and not compiled
    with torch.no_grad():
        model(contexts.input_ids)
    assert compiled                                         # elsewhere it still is


@pytest.mark.parametrize("refresh", [True, False])
def test_the_realised_kl_after_a_step_is_that_of_the_step(refresh):
    model, optimizer, contexts = prepared()
    optimizer.sketches.refresh = refresh
    proposal = optimizer.propose()
    before = logra.realised_kl(model, proposal, contexts, alpha=0.5)
    update = optimizer.step(0.5)
    assert logra.realised_kl(model, update, contexts, applied=True) == pytest.approx(before, rel=0.05)
    assert logra.realised_kl(model, proposal, contexts, alpha=0.5, applied=True) == pytest.approx(before, rel=0.05)
    assert logra.predicted_kl(model, update, contexts) == pytest.approx(before, rel=0.2)


def test_under_mixed_precision_the_prediction_is_that_of_float32_within_two_percent():
    model, optimizer, contexts = prepared()
    q = logra.predicted_kl(model, optimizer.propose(), contexts)
    with torch.autocast("cpu", torch.bfloat16):
        assert logra.predicted_kl(model, optimizer.propose(), contexts) == pytest.approx(q, rel=0.02)
    narrow = copy.deepcopy(model).bfloat16()
    assert logra.predicted_kl(narrow, optimizer.propose(), contexts) == pytest.approx(q, rel=0.02)


def test_a_head_that_is_sketched_itself_is_part_of_the_probe():
    model = models.qwen2(tie_word_embeddings=False)
    sketches = logra.attach(model, 16, modules=["lm_head"])
    models.loss(model, models.ids(2, 12)).backward()
    proposal = logra.SketchSGD(sketches, relative_step=1e-2).propose()
    contexts = logra.Contexts(models.ids(2, 12), torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.bool))
    q = logra.predicted_kl(model, proposal, contexts)
    assert q == pytest.approx(reference(model, proposal, contexts)[0], rel=1e-4) and q > 0


@pytest.mark.parametrize("change,words", [
    (lambda c: logra.Contexts(c.input_ids, c.attention_mask.flip(1), c.predictions.flip(1)), "padded on the right"),
    (lambda c: logra.Contexts(c.input_ids, c.attention_mask, torch.ones_like(c.predictions)), "no prediction lies in the padding"),
    (lambda c: logra.Contexts(c.input_ids, c.attention_mask, torch.zeros_like(c.predictions)), "no predictions to examine"),
])
def test_contexts_that_would_mislead_are_refused(change, words):
    model, optimizer, contexts = prepared()
    for measure in (logra.predicted_kl, logra.realised_kl):
        with pytest.raises(ValueError, match=words):
            measure(model, optimizer.propose(), change(contexts))
    with pytest.raises(ValueError, match="temperature must be positive"):
        logra.predicted_kl(model, optimizer.propose(), contexts, temperature=0.0)
    with pytest.raises(ValueError, match="unknown method 'central'"):
        logra.predicted_kl(model, optimizer.propose(), contexts, "central")
    with pytest.raises(ValueError, match="which the model's sketches do not"):
        logra.predicted_kl(model, {"lm_head": torch.zeros(1, 16)}, contexts)


def test_the_scale_is_equation_7():
    assert logra.step_scale(4e-4, 1e-4, 3.0) == pytest.approx(0.5) and logra.step_scale(1e-9, 1e-4, 3.0) == 3.0
    assert logra.step_scale(5e-324, 1e-4, 3.0) == 3.0 and logra.step_scale(0.0, 1e-4, 3.0) == 1.0 and logra.step_scale(0.0, 1e-4, 0.5) == 0.5
    for q in (math.nan, math.inf, -math.inf, -1e-12):
        with pytest.raises(FloatingPointError, match="no step can be scaled"):
            logra.step_scale(q, 1e-4, 3.0)
    for budget, alpha_max in ((0.0, 3.0), (math.nan, 3.0), (1e-4, 0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            logra.step_scale(1e-4, budget, alpha_max)


def test_the_cosine_budget_is_equation_16():
    budget = logra.CosineBudget(2e-4, 2e-5, updates=300)
    for u in (1, 2, 150, 299, 300):
        assert budget(u) == pytest.approx(2e-5 + (2e-4 - 2e-5) / 2 * (1 + math.cos(math.pi * (u - 1) / 299)), rel=1e-12)
    assert budget(1) == 2e-4 and budget(300) == budget(1000) == 2e-5 and logra.CosineBudget(2e-4, 2e-5, updates=1)(1) == 2e-5
    assert logra.ConstantBudget(1e-4)(1) == logra.ConstantBudget(1e-4)(10**6) == 1e-4


def test_mismatch_is_subtracted_as_equation_17_says_and_resumes(monkeypatch):
    q = SimpleNamespace(now=1e-4)
    monkeypatch.setattr(kl, "predicted_kl", lambda *_: q.now)
    control = logra.KLControl(logra.CosineBudget(2e-4, 2e-5, updates=5), mismatch=True)
    kappa, nothing = 0.0, torch.full((2, 4), math.nan)
    for u, gap in enumerate([3e-5, 9e-4, -5e-4, None, 1e-5], start=1):
        mask = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 1]]) * (gap is not None)
        trainer = torch.where(mask.bool(), -1.0, nothing)   # masked tokens may hold anything
        control.observe(torch.where(mask.bool(), trainer + (gap or 0.0), nothing), trainer, mask)
        if gap is not None:
            kappa = 0.7 * kappa + 0.3 * max(gap, 0.0)
        delta = 2e-5 + 9e-5 * (1 + math.cos(math.pi * (u - 1) / 4))
        effective = max(delta - kappa, 0.5 * delta) if gap is not None else delta
        assert control.scale(None, None, None) == pytest.approx(min(3.0, math.sqrt(effective / 1e-4)), rel=1e-3)
        assert control.kappa == pytest.approx(kappa, rel=1e-3) and control.budget_now == pytest.approx(effective, rel=1e-3)
        again = logra.KLControl(control.budget, mismatch=True)
        again.load_state_dict(control.state_dict())
        assert again.state_dict() == control.state_dict() == {"update": u + 1, "kappa": control.kappa}
    state, q.now = control.state_dict(), math.nan
    with pytest.raises(FloatingPointError, match="predicted KL is nan"):
        control.scale(None, None, None)
    with pytest.raises(FloatingPointError, match="one side"):
        control.observe(torch.tensor([[-math.inf, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2))
    assert control.state_dict() == state


def test_the_control_holds_the_realised_kl_at_its_budget():
    model, optimizer, contexts = prepared()
    control = logra.KLControl(logra.ConstantBudget(1e-5), alpha_max=3.0)
    alpha = control.scale(model, optimizer.propose(), contexts)
    assert 0 < alpha < 1 and control.q * alpha**2 == pytest.approx(1e-5)
    update = optimizer.step(alpha)
    assert logra.realised_kl(model, update, contexts, applied=True) == pytest.approx(1e-5, rel=0.1)


@pytest.mark.parametrize("measure", [logra.predicted_kl, logra.realised_kl, lambda *a, **k: logra.predicted_kl(*a, method="finite_difference", **k)])
def test_a_probe_in_micro_batches_is_the_probe(measure):
    model, optimizer, contexts = prepared(b=5)
    contexts.predictions[3] = False                         # a response without a token
    proposal, rows = optimizer.propose(), []
    handle = model.model.layers[0].register_forward_pre_hook(lambda module, args: rows.append(tuple(args[0].shape[:2])))
    whole = measure(model, proposal, contexts)
    assert {b for b, _ in rows} == {5}
    rows.clear()
    assert measure(model, proposal, contexts, micro_batch=2) == pytest.approx(whole, rel=1e-4)
    assert {b for b, _ in rows} == {2, 1} and min(t for _, t in rows) == 12               # the last response has 12 of 24 tokens
    handle.remove()


@pytest.mark.parametrize("build", [models.qwen2, models.llama, models.qwen3_5])
@pytest.mark.parametrize("padded", [True, False])
def test_long_contexts_are_probed_by_blocks_of_queries(build, padded, monkeypatch):
    model, optimizer, contexts = prepared(build)
    if not padded:
        contexts = logra.Contexts(contexts.input_ids[:1], contexts.attention_mask[:1], contexts.predictions[:1])
    proposal, blocks = optimizer.propose(), []
    q = logra.predicted_kl(model, proposal, contexts)
    blockwise = attention.blockwise
    monkeypatch.setattr(attention, "blockwise", lambda *args, **kwargs: blocks.append(1) or blockwise(*args, **kwargs))
    monkeypatch.setattr(attention, "_SCORES", 3 * 4 * 24 * 5)
    assert logra.predicted_kl(model, proposal, contexts) == pytest.approx(q, rel=1e-5) and blocks
    blocks.clear()
    model(contexts.input_ids)
    assert not blocks                                       # in the probe alone


@pytest.mark.parametrize("mask", ["causal", "bool", "row", "float", "none"])
@pytest.mark.parametrize("groups", [1, 3])
def test_blockwise_attention_is_attention_and_so_are_its_rates(mask, groups, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", 2 * 6 * 13 * 4)
    generator = torch.Generator().manual_seed(0)
    q, k, v, *rates = (torch.randn(2, heads, 13, 8, generator=generator, dtype=torch.float64) for heads in (6, 6 // groups, 6 // groups) * 2)
    seen = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, 13, 13)
    kwargs = {"causal": dict(is_causal=True), "bool": dict(attn_mask=seen), "row": dict(attn_mask=(torch.arange(13) < 9)[None]), "none": {},
              "float": dict(attn_mask=torch.randn(2, 1, 13, 13, generator=generator, dtype=torch.float64))}[mask] | dict(scale=0.4, enable_gqa=groups > 1)
    results = []
    for function in (attention.blockwise, torch.nn.functional.scaled_dot_product_attention):
        with kl.forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            duals = [kl.forward_ad.make_dual(x, rate) for x, rate in zip((q, k, v), rates)]
            results.append(kl.forward_ad.unpack_dual(function(*duals, **kwargs)))
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_scores_of_a_long_context_never_exist_at_once(monkeypatch):
    from logra.rl.footprint import Meter

    model, optimizer, _ = prepared(models.llama, max_position_embeddings=2048)
    ids, proposal, peaks = models.ids(1, 1500), optimizer.propose(), []
    contexts = logra.Contexts(ids, torch.ones_like(ids), torch.arange(1500)[None] >= 1400)
    for scores in (1 << 18, 1 << 30):
        monkeypatch.setattr(attention, "_SCORES", scores)
        meter = Meter()
        with meter.measuring():
            logra.predicted_kl(model, proposal, contexts)
        meter.at_peak()
        peaks.append(meter.peak)
    assert peaks[1] > 4 * 4 * 3 * 1500**2 and peaks[0] < peaks[1] / 6

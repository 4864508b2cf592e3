"""Chunked log-probabilities and entropies: values and derivatives of the whole in float64, and never more logits than a chunk's."""

import models
import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra import logprobs
from logra.logprobs import token_logprobs

N, H, V = 23, 12, 41


def problem(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    h, W, b = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((N, H), (V, H), (V,)))
    return h, W, b if bias else None, torch.randint(0, V, (N,), generator=generator)


def reference(h, W, b, targets, temperature):
    """(log p, entropy) by plain autograd on all logits at once."""
    logp = torch.log_softmax(F.linear(h, W, b) / temperature, -1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


def cut(monkeypatch, tokens):
    monkeypatch.setattr(logprobs, "chunk_tokens", lambda vocabulary: tokens)


@pytest.mark.parametrize("tokens", [1, 5, 23, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
def test_values_gradients_and_rates_are_those_of_the_whole(tokens, temperature, bias, entropy, monkeypatch):
    cut(monkeypatch, tokens)
    h, W, b, targets = problem(bias=bias)
    inputs = [x.requires_grad_() for x in (h, W, b) if x is not None]
    weights = torch.linspace(-1, 2, N, dtype=torch.float64)

    def total(outputs):
        return (outputs[0] * weights).sum() + (outputs[1].square() * weights).sum() if entropy else (outputs[0] * weights).sum()

    ours = token_logprobs(h, W, targets, b, temperature, entropy=entropy)
    ours, whole = ours if entropy else (ours,), reference(h, W, b, targets, temperature)
    for a, want in zip(ours, whole):
        torch.testing.assert_close(a, want, rtol=1e-12, atol=1e-12)
    for a, want in zip(torch.autograd.grad(total(ours), inputs), torch.autograd.grad(total(whole), inputs)):
        torch.testing.assert_close(a, want, rtol=1e-10, atol=1e-12)
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.detach(), torch.cos(x.detach())) for x in inputs] + [None] * (b is None)
        ours = token_logprobs(duals[0], duals[1], targets, duals[2], temperature, entropy=entropy)
        for a, want in zip(ours if entropy else (ours,), reference(*duals, targets, temperature)):
            torch.testing.assert_close(forward_ad.unpack_dual(a).tangent, forward_ad.unpack_dual(want).tangent, rtol=1e-10, atol=1e-12)


def test_in_float32_the_bits_are_those_of_plain_autograd():
    h, W, b, targets = problem(torch.float32)
    grads = []
    for f in (lambda: token_logprobs(h, W, targets, b, 0.7), lambda: reference(h, W, b, targets, 0.7)[0]):
        h, W, b = (x.detach().requires_grad_() for x in (h, W, b))
        out = f()
        grads.append([out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 2, N)).sum(), (h, W, b))])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_a_token_without_probability_has_no_share_in_the_entropy(monkeypatch):
    cut(monkeypatch, 5)
    h, W, b, targets = problem()
    b[V - 3:], targets = -torch.inf, targets % (V - 3)      # a vocabulary padded to a round size
    h.requires_grad_()
    outputs = token_logprobs(h, W, targets, b, entropy=True)
    whole = reference(h, W[:V - 3], b[:V - 3], targets, 1.0)
    grads = [torch.autograd.grad(sum(x.sum() for x in pair), h)[0] for pair in (outputs, whole)]
    for a, want in zip((*outputs, grads[0]), (*whole, grads[1])):
        torch.testing.assert_close(a, want, rtol=1e-10, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operator returned, of those that are not known."""

    def __init__(self, known):
        super().__init__()
        self.known, self.most = {x.data_ptr() for x in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.most = max(self.most, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_logits_than_a_chunks_exist_and_a_frozen_head_gets_no_gradient(dtype, monkeypatch):
    cut(monkeypatch, 4)
    h, W, b, targets = (x.repeat(10, *[1] * (x.dim() - 1)) if x.dim() == 2 and len(x) == N else x for x in problem(dtype))
    targets = targets.repeat(10)
    h.requires_grad_()
    with Largest([h, W, b]) as largest:
        sum(x.sum() for x in token_logprobs(h, W, targets, b, entropy=True)).backward()
    assert largest.most <= max(h.numel(), 4 * V) < len(h) * V and W.grad is None and b.grad is None and h.grad.dtype == dtype


@pytest.mark.parametrize("inside", [True, False])
def test_under_autocast_it_is_the_head_in_bfloat16_and_the_rest_in_float32(inside):
    h, W, b, targets = problem(torch.float32)
    results = []
    for f in (lambda: token_logprobs(h, W, targets, b, 0.6), None):
        h, W = h.detach().requires_grad_(), W.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = f() if f else torch.log_softmax(F.linear(h, W, b).float() / 0.6, -1)[torch.arange(N), targets]
            out.sum().backward() if inside else None
        None if inside else out.sum().backward()
        results.append((out.detach(), h.grad, W.grad))
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(*results))


@pytest.mark.parametrize("build", [models.qwen2, models.llama, models.gemma2, lambda: models.qwen2(tie_word_embeddings=False)])
def test_a_models_logprobs_and_all_gradients_are_those_of_its_own_logits(build, monkeypatch):
    from logra.rl import loss

    cut(monkeypatch, 7)
    model = build().double()
    ids = models.ids(3, 14)
    mask = torch.arange(14) < torch.tensor([14, 11, 9])[:, None]
    response = mask & (torch.arange(14) > 4)
    results = []
    for whole in (False, True):
        model.zero_grad()
        if whole:
            log_p = torch.log_softmax(model(input_ids=ids, attention_mask=mask.long()).logits[:, :-1] / 0.8, -1)
            chosen = log_p.gather(2, ids[:, 1:, None])[..., 0][response[:, 1:]]
            entropy = -(log_p.exp() * log_p).sum(-1)[response[:, 1:]]
        else:
            chosen, entropy = loss.token_logprobs(model, ids, mask.long(), response, 0.8, entropy=True)
        (chosen.square().sum() + 0.3 * entropy.sum()).backward()
        results.append([chosen.detach(), entropy.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])])
    for a, want in zip(*results):                           # a tied head's gradient adds to the embedding's
        torch.testing.assert_close(a, want, rtol=1e-9, atol=1e-11)

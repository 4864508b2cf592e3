"""The policy gradient of a batch of responses: −A · min(π_train / π_rollout, cap) · ∇ log π, mean over the batch's generated tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from logra import logprobs

if TYPE_CHECKING:
    from logra.rl.rollout import Rollout


def token_logprobs(model, input_ids, attention_mask, response_mask, temperature: float = 1.0, entropy: bool = False):
    """log π of the generated tokens, float32 [n], in the order of response_mask's True places (row by row); with `entropy`, also the
    policy's entropy at each, [n].

    input_ids, attention_mask, response_mask: [b, t], right-padded. No [b, t, vocabulary] tensor exists (see `logra.logprobs`), but for a
    model whose logits are more than a fixed linear map of its hidden states: a capped or sketched head.
    """
    inputs = dict(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    places = response_mask[:, 1:]                           # the place before a token is the one that predicts it
    targets = input_ids[:, 1:][places]
    head = logprobs.linear_head(model)
    if head is None:
        logp = torch.log_softmax(logprobs.wide(model(**inputs).logits[:, :-1][places]) / temperature, -1)
        chosen = logp.gather(1, targets[:, None])[:, 0]
        return (chosen, torch.special.entr(logp.exp()).sum(-1)) if entropy else chosen
    h_nh = model.base_model(**inputs).last_hidden_state[:, :-1][places]
    return logprobs.token_logprobs(h_nh, head.weight, targets, head.bias, temperature, entropy=entropy)


def policy_loss(logprobs: torch.Tensor, rollout: Rollout, advantages: torch.Tensor, tokens: int, cap: float = 2.0) -> torch.Tensor:
    """A micro-batch's share of the batch's loss, a scalar; shares add up to the loss whatever the micro-batching.

    logprobs: [n], as `token_logprobs` gives them for `rollout`. advantages: float32 [b]. tokens: generated tokens in the whole
    batch. The importance weight corrects for a rollout engine that is not quite the trainer; it carries no gradient.
    """
    per_token = advantages[:, None].expand(rollout.response_mask.shape)[rollout.response_mask]
    weight = (logprobs.detach() - rollout.logprobs[rollout.response_mask]).exp().clamp(max=cap)
    return -(per_token * weight * logprobs).sum() / tokens

"""The policy gradient of a batch of responses: −A · min(π_train / π_rollout, cap) · ∇ log π, mean over the batch's generated tokens."""

import torch
from torch.utils.checkpoint import checkpoint

from logra.rl.rollout import Rollout

_CHUNK = 1024                                               # tokens whose logits exist at a time


def token_logprobs(model, input_ids, attention_mask, response_mask, temperature: float = 1.0) -> torch.Tensor:
    """log π of the generated tokens, float32 [n], in the order of response_mask's True places (row by row).

    input_ids, attention_mask, response_mask: [b, t], right-padded. The logits, divided by the temperature in float32, are made
    and made again in backward for 1,024 tokens at a time: no [b, t, vocabulary] tensor exists.
    """
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    h_nh = hidden[:, :-1][response_mask[:, 1:]]             # the place before a token is the one that predicts it
    targets = input_ids[:, 1:][response_mask[:, 1:]]
    head = model.get_output_embeddings()

    def chunk(h, target):
        return torch.log_softmax(head(h).float() / temperature, -1).gather(1, target[:, None])[:, 0]

    if len(targets) <= _CHUNK:
        return chunk(h_nh, targets)
    return torch.cat([checkpoint(chunk, h, target, use_reentrant=False) for h, target in zip(h_nh.split(_CHUNK), targets.split(_CHUNK))])


def policy_loss(logprobs: torch.Tensor, rollout: Rollout, advantages: torch.Tensor, tokens: int, cap: float = 2.0) -> torch.Tensor:
    """A micro-batch's share of the batch's loss, a scalar; shares add up to the loss whatever the micro-batching.

    logprobs: [n], as `token_logprobs` gives them for `rollout`. advantages: float32 [b]. tokens: generated tokens in the whole
    batch. The importance weight corrects for a rollout engine that is not quite the trainer; it carries no gradient.
    """
    per_token = advantages[:, None].expand(rollout.response_mask.shape)[rollout.response_mask]
    weight = (logprobs.detach() - rollout.logprobs[rollout.response_mask]).exp().clamp(max=cap)
    return -(per_token * weight * logprobs).sum() / tokens

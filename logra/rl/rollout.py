"""Rollouts: responses sampled by Hugging Face's generate, with the log-probability of each sampled token."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper


@dataclass(frozen=True)
class Rollout:
    """Prompts with one response each, right-padded: b responses of at most t tokens, prompt included.

    input_ids, attention_mask: int64 [b, t]. response_mask: bool [b, t], the generated tokens, the closing one included.
    logprobs: float32 [b, t], log π_rollout of the generated tokens at the sampling temperature, 0 elsewhere.
    complete: bool [b], True where the response ended by itself. texts: the responses.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    response_mask: torch.Tensor
    logprobs: torch.Tensor
    complete: torch.Tensor
    texts: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, rows: slice) -> "Rollout":
        """Some of the responses, cut to their longest."""
        length = int(self.attention_mask[rows].sum(1).max())
        parts = (x[rows, :length] for x in (self.input_ids, self.attention_mask, self.response_mask, self.logprobs))
        return Rollout(*parts, self.complete[rows], self.texts[rows])


class _Recorder(LogitsProcessor):
    """Notes the log-probability of each sampled token: it is known when the next token's scores come."""

    def __init__(self):
        self.logprobs, self._before = [], None

    def __call__(self, input_ids, scores):
        self.look_up(input_ids[:, -1])
        self._before = torch.log_softmax(scores.float(), -1)
        return scores

    def look_up(self, sampled):
        if self._before is not None:
            self.logprobs.append(self._before.gather(1, sampled[:, None])[:, 0])


def named_seed(*parts) -> int:
    """The seed of one random draw, from its name."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little") >> 1


def deterministic() -> None:
    """The same bits each time, on the CPU. On a GPU that is not promised: what has no deterministic kernel there (the cumulative sum in linear
    attention) warns and goes on, and new memory is not filled."""
    gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(True, warn_only=gpu)
    torch.utils.deterministic.fill_uninitialized_memory = not gpu


@torch.no_grad()
def generate(model, tokenizer, prompts: Sequence[str], seed: int, max_new_tokens: int, temperature: float = 1.0,
             top_p: float = 1.0, recorded: bool = True, length: int | None = None) -> Rollout:
    """One sampled response to each prompt. `seed` alone decides the draws; torch's global generators are left as they were.

    recorded: with log-probabilities, for training; then top_p must be 1, for a truncated distribution is not the policy's.
    length: tokens that a prompt and its response have together at most; None: no such limit.
    Raises ValueError for an empty prompt list, for top_p < 1 with recorded, or for a prompt that leaves no room.
    """
    if not prompts:
        raise ValueError("no prompts were given: a rollout needs one at least")
    if recorded and top_p < 1:
        raise ValueError(f"top_p is {top_p}: a training rollout needs 1, since sampled log-probabilities would be those of a truncated distribution")
    inputs = encode(tokenizer, prompts).to(model.device)
    room = torch.full((len(prompts),), max_new_tokens, device=model.device)
    if length is not None:
        room = room.minimum(length - inputs.attention_mask.sum(1))
        if int(room.min()) < 1:
            raise ValueError(f"a prompt has {length - int(room.min())} tokens, and it may have no more than {length - 1} if a response is to follow: raise the context, or drop the prompt")
        max_new_tokens = int(room.max())
    stops = stop_tokens(tokenizer, model.generation_config)
    recorder, processors = _Recorder(), LogitsProcessorList()
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if recorded:
        processors.append(recorder)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=top_p, max_new_tokens=max_new_tokens,
                             logits_processor=processors, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id)
    start = inputs.input_ids.shape[1]
    generated = out[:, start:]
    ends = torch.isin(generated, torch.tensor(stops, device=generated.device))
    ends &= torch.arange(generated.shape[1], device=generated.device) < room[:, None]
    complete = ends.any(1)
    lengths = torch.where(complete, ends.int().argmax(1) + 1, room.clamp(max=generated.shape[1]))
    if recorded:
        recorder.look_up(generated[:, -1])
        logprobs = torch.stack(recorder.logprobs, 1)
    else:
        logprobs = torch.zeros(generated.shape, device=model.device)
    rows, masks, logs = [], [], []
    for i, n in enumerate(lengths.tolist()):
        prompt = inputs.input_ids[i][inputs.attention_mask[i].bool()]
        rows.append(torch.cat([prompt, generated[i, :n]]))
        masks.append(torch.cat([torch.zeros_like(prompt), torch.ones_like(generated[i, :n])]).bool())
        logs.append(torch.cat([torch.zeros(len(prompt), device=model.device), logprobs[i, :n]]))
    input_ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    texts = [tokenizer.decode(generated[i, :n], skip_special_tokens=True) for i, n in enumerate(lengths.tolist())]
    return Rollout(input_ids, attention_mask, pad_sequence(masks, batch_first=True), pad_sequence(logs, batch_first=True), complete, texts)


def encode(tokenizer, prompts):
    """Left-padded token ids, through the chat template where the tokenizer has one. A prompt is a text, or a list of chat messages (where a
    task has its own system's message). Raises ValueError for messages and a tokenizer without a template."""
    chat = tokenizer.chat_template is not None
    if not chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("a prompt is a list of chat messages, but this model's tokenizer has no chat template: give texts, or a chat model")
    if chat:
        conversations = [[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt for prompt in prompts]
        prompts = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for messages in conversations]
    return tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not chat, return_token_type_ids=False)


def stop_tokens(tokenizer, generation_config) -> list[int]:
    """The tokens that end a response: the tokenizer's, those of the model's generation config, and <|im_end|> where the chat template ends a turn with
    it: a base model (Qwen2.5-Math) has another eos."""
    own, turn = generation_config.eos_token_id, "<|im_end|>"
    own = [] if own is None else own if isinstance(own, list) else [own]
    ends = [tokenizer.convert_tokens_to_ids(turn)] if turn in str(tokenizer.chat_template) and turn in tokenizer.get_vocab() else []
    return sorted({tokenizer.eos_token_id, *own, *ends})

"""Damaged messages against a receiver: every one has to be refused by name, or be a message that changes nothing.

    python benchmarks/sync_fuzz.py [--messages 10000] [--seed 0]

A receiver follows a run for a few updates. Then each trial takes one of the run's messages, or one of another run or model, damages
it in one way, and gives it to the receiver, whose weights, version and run must stand as they were. Half of the inner damage is done
under a right digest, as a faulty sender would make it. Exits 1 if any message was applied, crashed the receiver or had no name.
"""

import argparse
import copy
import random
import sys
import time
from collections import Counter

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import logra
from logra import sync, wire

DAMAGES = ("flip a byte", "flip bits of the head", "cut", "extend", "exchange two blocks", "replay", "from the future", "other run", "other base",
           "other embeddings", "other model", "old full weights", "resealed bytes", "resealed tensor", "resealed field", "noise")


def small(seed: int, hidden: int = 32) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=40, hidden_size=hidden, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                        num_key_value_heads=1, head_dim=16)).eval()


class Sender:
    """A run of a small model with steps from random sketches: full weights at the start, and its updates, as messages."""

    def __init__(self, model, seed: int = 1, updates: int = 6, run: str | None = None):
        self.base = copy.deepcopy(model)
        sketches = logra.attach(model, 8, seed=seed)
        if run:
            sketches.run = run
        optimizer, generator = logra.SketchSGD(sketches, relative_step=1e-3), torch.Generator().manual_seed(seed)
        self.full, self.updates = [sync.full_weights(model)], []
        for _ in range(updates):
            for sketch in sketches.values():
                sketch.S_dr.normal_(generator=generator)
            self.updates.append(optimizer.step().to_bytes())
            self.full.append(sync.full_weights(model))


class Trial:
    """The damage: `damaged(kind)` is a message that must not change a receiver that stands after update `at`."""

    def __init__(self, seed: int, at: int = 3):
        self.dice, self.at = random.Random(seed), at
        self.run, self.other_run = Sender(small(0)), Sender(small(0), run="another run")
        self.other_base, self.other_model = Sender(small(1)), Sender(small(0, hidden=48))
        model = small(0)
        model.model.embed_tokens.weight.data[3, 5] += 0.01  # which no message carries
        self.other_embeddings = Sender(model)

    def receiver(self) -> sync.Receiver:
        receiver = sync.Receiver(copy.deepcopy(self.run.base))
        for message in self.run.updates[:self.at]:
            receiver.apply(message)
        return receiver

    def damaged(self, kind: str) -> bytes:
        dice, good = self.dice, self.run.updates[self.at]   # the one that would be applied
        any_of = lambda sender: dice.choice(sender.updates + sender.full)
        match kind:
            case "flip a byte":
                return self._flipped(dice.choice([good, self.run.full[-1]]), 1, 0)
            case "flip bits of the head":
                return self._flipped(good, dice.randint(1, 4), 0, wire.HEAD.size)
            case "cut":
                return good[:dice.randrange(len(good))]
            case "extend":
                return good + dice.randbytes(dice.randint(1, 64))
            case "exchange two blocks":
                size = dice.randint(1, len(good) // 4)
                a, b = sorted(dice.sample(range(0, len(good) - size, size), 2))
                blocks = good[:a] + good[b:b + size] + good[a + size:b] + good[a:a + size] + good[b + size:]
                return blocks if blocks != good else good[:-1]
            case "replay":
                return dice.choice(self.run.updates[:self.at])
            case "from the future":
                return dice.choice(self.run.updates[self.at + 1:])
            case "other run":
                return any_of(self.other_run)
            case "other base":
                return any_of(self.other_base)
            case "other embeddings":
                return any_of(self.other_embeddings)
            case "other model":
                return any_of(self.other_model)
            case "old full weights":
                return dice.choice(self.run.full[:self.at])
            case "resealed bytes":
                body = self._flipped(wire.opened(good), dice.randint(1, 3), 0)
                return wire.seal(body)
            case "resealed tensor":
                tensors, about = wire.unpack(wire.opened(good))
                name = dice.choice(sorted(tensors))
                flat = tensors[name].view(-1)
                place = dice.randrange(len(flat))
                flat[place] = flat[place] ^ (1 << dice.randrange(7))
                return wire.seal(wire.pack(tensors, about))
            case "resealed field":
                tensors, about = wire.unpack(wire.opened(good))
                at = dice.choice([about, dice.choice(list(about["matrices"].values()))])
                name = dice.choice(sorted(at))
                junk = dice.choice([None, -1, 0, 2 ** 70, 1.5, "", "x" * 16, [], {}, True])
                if at[name] == junk:
                    junk = "other"
                at[name] = junk
                return wire.seal(wire.pack(tensors, about))
            case "noise":
                return dice.choice([dice.randbytes(dice.randint(0, 2000)), wire.seal(dice.randbytes(dice.randint(0, 2000)))])

    def _flipped(self, message: bytes, times: int, low: int, high: int | None = None) -> bytes:
        made = bytearray(message)
        for place in self.dice.sample(range(low, high or len(made)), times):
            made[place] ^= 1 << self.dice.randrange(8)
        return bytes(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trial, tally, wrong, start = Trial(options.seed), Counter(), [], time.perf_counter()
    receiver = trial.receiver()
    held = receiver.fingerprints()
    for number in range(options.messages):
        kind = DAMAGES[number % len(DAMAGES)]
        message = trial.damaged(kind)
        try:
            answer = receiver.apply(message).status         # the one message that may be taken is a duplicate, and it changes nothing
        except sync.SyncError as error:
            answer = error.reason
        except Exception as error:
            answer = f"crashed: {type(error).__name__}: {error}"
        tally[kind, answer] += 1
        if answer == "applied" or answer.startswith("crashed") or (receiver.version, receiver.interrupted) != (trial.at, None):
            wrong.append((kind, answer))
            receiver = trial.receiver()
        elif number % 100 == 0 and receiver.fingerprints() != held:
            wrong.append((kind, "weights moved"))
    if receiver.fingerprints() != held:
        wrong.append(("at the end", "weights moved"))
    for kind in DAMAGES:
        answers = sorted((answer, count) for (k, answer), count in tally.items() if k == kind)
        print(f"{kind:<24}", ", ".join(f"{answer} {count}" for answer, count in answers))
    print(f"{options.messages} messages in {time.perf_counter() - start:.0f} s: {len(wrong)} applied, crashed or unnamed{': ' + str(wrong[:5]) if wrong else ''}; "
          f"the next right update is then {receiver.apply(trial.run.updates[trial.at]).status}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""A trainer whose updates a receiver follows, for the tests of synchronisation."""

import copy

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import logra
from logra import wire
from logra.update import LowRankUpdate



def small(seed=0, **changes):
    torch.manual_seed(seed)
    config = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                  tie_word_embeddings=True)
    return Qwen2ForCausalLM(Qwen2Config(**(config | changes))).eval()


class Trainer:
    """A model whose sketches are filled at random: a step is then as any other to the receiver."""

    def __init__(self, model=None, rank=8, bits=8, relative_step=1e-3, **changes):
        self.model = small() if model is None else model
        self.base = copy.deepcopy(self.model)
        self.sketches = logra.attach(self.model, rank, **changes)
        self.optimizer = logra.RowAdam(self.sketches, relative_step=relative_step, bits=bits)
        self.generator = torch.Generator().manual_seed(7)

    def step(self) -> LowRankUpdate:
        for sketch in self.sketches.values():
            sketch.S_dr.normal_(generator=self.generator)
        return self.optimizer.step()

    def differing(self, model) -> int:
        """Bits that differ between bfloat16(master) and a rollout's weights, over all matrices."""
        pairs = [(sketch.weight.bfloat16(), model.get_submodule(name).weight.bfloat16()) for name, sketch in self.sketches.items()]
        return sum(int((a.view(torch.int16) ^ b.view(torch.int16)).count_nonzero()) for a, b in pairs)


def elsewhere(trainer, seed=5):
    """The trainer's base with other selected matrices: what full weights can mend."""
    model, generator = copy.deepcopy(trainer.base), torch.Generator().manual_seed(seed)
    for name in trainer.sketches:
        torch.nn.init.normal_(model.get_submodule(name).weight, std=0.02, generator=generator)
    return model


def state(receiver):
    """Everything that a refused message must leave as it was."""
    return receiver.fingerprints(), receiver.version, receiver.run, receiver.base, receiver.session, receiver.interrupted


def resealed(message, change):
    """A message with a right digest and other content, as a faulty sender would make it."""
    tensors, about = wire.unpack(wire.opened(message))
    change(tensors, about)
    return wire.seal(wire.pack(tensors, about))


def another_factor(tensors, about):
    next(t for name, t in tensors.items() if name.endswith(":factor"))[0, 0] += 1

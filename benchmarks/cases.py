"""What is timed: the seven projections of a decoder layer, the layer, or the model, under each method, on the same weights.

dense            gradients of the seven projections, set to None before each pass
dense, added up  the same, added to gradients that are there, as in every micro-batch but an update's first
logra            sketches of them, as `logra.attach` makes them; A is hashed in each forward
logra, shared A  with one A and one X Aᵀ for q, k and v, and one for gate and up
logra, P kept    where the layer is checkpointed: X Aᵀ and attention's output are kept (`logra.checkpointing`)
lora             adapters on them (peft); their dtype is that of the weights
flora            dense gradients, compressed a matrix at a time as they are made (flora-opt's FloraAccelerator, accumulating)

GaLore's forward and backward are the dense ones: it differs in the optimizer.
"""

import copy
from collections.abc import Callable

import peft
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

import logra
from logra.checkpointing import keep_projections
from logra.memory import configuration
from logra.theory import step_flops
from timing import Case, precision

GROUPS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
NAMES = [f"{group}.{name}" for group, names in GROUPS.items() for name in names]
CONFIGS = {                                                 # tiny: for the tests
    "tiny": lambda: transformers.Qwen2Config(vocab_size=211, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
                                             num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True),
    "smollm2-135m": lambda: configuration("SmolLM2-135M"),
    "1.5b": lambda: configuration("Qwen2.5-Math-1.5B"),
    "7b": lambda: configuration("Qwen2.5-Math-7B"),
}
METHODS = ("dense", "dense, added up", "logra", "logra, shared A", "logra, P kept", "lora", "flora")


def shapes(config) -> dict[str, tuple[int, int]]:
    """(d, k) of a layer's seven projections."""
    h, m = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or h // config.num_attention_heads
    q, kv = head * config.num_attention_heads, head * config.num_key_value_heads
    return dict(zip(NAMES, [(q, h), (kv, h), (kv, h), (h, q), (m, h), (m, h), (h, m)]))


def floor(config, rank: int) -> float:
    """The FLOPs of LoGRA's forward and backward of a layer's projections over those of the dense ones (Section 2.1)."""
    sizes = shapes(config).values()
    return sum(step_flops(1, d, k, rank) for d, k in sizes) / sum(step_flops(1, d, k) for d, k in sizes)


class Projections(nn.Module):
    """A layer's seven projections and nothing else. Inputs: of q, k and v; of o; of gate and up; of down."""

    def __init__(self, config, dtype, device):
        super().__init__()
        biased = isinstance(config, transformers.Qwen2Config)
        for group, names in GROUPS.items():
            part = nn.Module()
            for name in names:
                d, k = shapes(config)[f"{group}.{name}"]
                part.add_module(name, nn.Linear(k, d, bias=biased and name in ("q_proj", "k_proj", "v_proj"), dtype=dtype, device=device))
            self.add_module(group, part)

    def forward(self, x, attended, y, gated):
        a, m = self.self_attn, self.mlp
        return a.q_proj(x), a.k_proj(x), a.v_proj(x), a.o_proj(attended), m.gate_proj(y), m.up_proj(y), m.down_proj(gated)


def projections(config, tokens: int, dtype: str, device: str) -> tuple[nn.Module, Callable]:
    """The seven projections, and how to run them: forward and backward, inputs' gradients included."""
    kept = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    module = Projections(config, kept, device)
    computed = torch.float32 if dtype == "float32" else torch.bfloat16
    draw = torch.Generator().manual_seed(0)
    width = shapes(config)["self_attn.o_proj"][1]
    inputs = [torch.randn(1, tokens, k, generator=draw).to(device, computed).requires_grad_()
              for k in (config.hidden_size, width, config.hidden_size, config.intermediate_size)]
    outputs = [torch.randn(1, tokens, d, generator=draw).to(device, computed) for d, _ in shapes(config).values()]

    def run(under):
        for x in inputs:
            x.grad = None
        with precision(dtype, device):
            made = under(*inputs)
        torch.autograd.backward(made, outputs)

    return module, run


def layer(config, tokens: int, dtype: str, device: str, checkpointed: bool = False) -> tuple[nn.Module, Callable]:
    """A decoder layer in the middle of a model, and how to run it: forward and backward, with its forward run again in between or not."""
    kept = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    body = transformers.AutoModel.from_config(_shallow(config, 1), dtype=kept).to(device)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1, tokens, config.hidden_size, generator=draw).to(device, kept).requires_grad_()
    dy = torch.randn(1, tokens, config.hidden_size, generator=draw).to(device, kept)
    positions = torch.arange(tokens, device=device)[None]
    rotary = body.rotary_emb(x.detach(), positions)

    def run(under):
        x.grad = None
        with precision(dtype, device):
            y = forward(under)
        y.backward(dy)

    def forward(under):
        inputs = dict(position_embeddings=rotary, position_ids=positions, attention_mask=None)
        if not checkpointed:
            return under(x, **inputs)
        return checkpoint(under, x, use_reentrant=False, context_fn=getattr(under, "context_fn", noop_context_fn), **inputs)

    run.forward = forward
    return body.layers[0].train(), run


def checkpointed(config, tokens: int, dtype: str, device: str) -> tuple[nn.Module, Callable]:
    """The same under non-reentrant activation checkpointing."""
    return layer(config, tokens, dtype, device, checkpointed=True)


def _shallow(config, layers: int):
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


def under(base: nn.Module, names: list[str], method: str, rank: int | None) -> tuple[nn.Module, Callable[[], None], object]:
    """`base` under a method, on base's own storage: (the module, what to do before a pass, the method's own object).

    Raises ValueError for an unknown method.
    """
    module = copy.deepcopy(base, {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in base.parameters()})
    weights = [module.get_submodule(name).weight for name in names]
    if method.startswith("logra"):
        sketches = logra.attach(module, rank, modules=names, seed=1, share_inputs="shared" in method)
        if "P kept" in method:
            module.context_fn = keep_projections
        return module, lambda: None, sketches
    if method == "lora":
        adapters = peft.LoraConfig(r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=names)
        peft.inject_adapter_in_model(adapters, module)
        return module, lambda: module.zero_grad(), [p for p in module.parameters() if p.requires_grad]
    for weight in weights:
        weight.requires_grad_(True)
    if method == "dense":
        return module, lambda: module.zero_grad(), weights
    if method == "dense, added up":
        return module, lambda: None, weights
    if method == "flora":
        return module, lambda: None, _compressing(weights, rank)
    raise ValueError(f"unknown method {method!r}: it is one of {', '.join(METHODS)}")


def _compressing(weights: list[nn.Parameter], rank: int):
    """flora-opt's accelerator on these weights: what it holds back until an update, it compresses in each backward."""
    from flora_opt import Flora, FloraAccelerator

    accelerator = FloraAccelerator(accumulation_compression_rank=rank, gradient_accumulation_steps=1 << 30, cpu=weights[0].device.type == "cpu")
    accelerator.prepare_optimizer(Flora(weights, lr=1e-6, rank=rank, beta1=0.9))
    with accelerator.accumulate():                          # from here on it accumulates
        pass
    return accelerator


def passes(make: Callable, config, tokens: int, dtype: str, device: str, ranks: list[int], methods: list[str]) -> list[Case]:
    """A case a method and rank: one forward and backward of what `make` (projections, layer, checkpointed) makes, all on the same weights."""
    torch.manual_seed(0)
    base, run = make(config, tokens, dtype, device)
    cases = []
    for method in methods:
        if method == "logra, P kept" and make is not checkpointed:
            continue                                        # without checkpointing P is kept in any case
        for rank in ([None] if method.startswith("dense") else ranks):
            module, before, _ = under(base, NAMES, method, rank)
            cases.append(Case(method, (lambda module=module: run(module)), rank, before))
    return cases

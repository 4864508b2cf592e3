"""Tiny models of real architectures with random weights, shared by the unit tests."""

import torch
import transformers
from torch import nn

from logra.rl.models import smollm2

VOCABULARY = 211                                            # odd sizes, so that no two axes are mistaken for each other


def qwen2(seed=0, **changes):
    settings = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True)
    return _build(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**settings | changes), seed)


def llama(seed=0, **changes):
    """SmolLM2's shape: tied embeddings, no biases."""
    settings = dict(vocab_size=VOCABULARY, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=3,
                    num_key_value_heads=3, max_position_embeddings=256, tie_word_embeddings=True)
    return _build(transformers.LlamaForCausalLM, transformers.LlamaConfig(**settings | changes), seed)


def small_smollm2(folder, **changes):
    """A narrow model of SmolLM2's kind with its tokenizer, as a folder. Returns the folder."""
    config = transformers.AutoConfig.from_pretrained(smollm2())
    for name, value in changes.items():
        setattr(config, name, value)
    _build(transformers.LlamaForCausalLM, config, 0).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(smollm2()).save_pretrained(folder)
    return folder


def qwen3_5_settings(**changes):
    return dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
                linear_value_head_dim=16, layer_types=["linear_attention", "full_attention"], max_position_embeddings=256,
                rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[1, 1, 2])) | changes


def qwen3_5(seed=0):
    """The 27B's class: every other block has linear attention."""
    return _build(transformers.Qwen3_5ForCausalLM, transformers.Qwen3_5TextConfig(**qwen3_5_settings()), seed)


def qwen3_5_with_vision(seed=0):
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64)
    config = transformers.Qwen3_5Config(text_config=qwen3_5_settings(), vision_config=vision)
    return _build(transformers.Qwen3_5ForConditionalGeneration, config, seed)


def qwen3_moe(seed=0):
    config = transformers.Qwen3MoeConfig(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=24,
                                         num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
                                         num_experts=20, num_experts_per_tok=2)
    return _build(transformers.Qwen3MoeForCausalLM, config, seed)


def gemma2(seed=0):
    """Its logits are capped: more than a linear head."""
    config = transformers.Gemma2Config(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                       num_key_value_heads=2, head_dim=16, final_logit_softcapping=3.0)
    return _build(transformers.Gemma2ForCausalLM, config, seed)


def gpt2(seed=0):
    return _build(transformers.GPT2LMHeadModel, transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=2, n_positions=64), seed)


def _build(cls, config, seed):
    torch.manual_seed(seed)
    model = cls(config)
    for parameter in model.parameters():                    # biases and norms away from 0 and 1, which would hide faults
        if parameter.dim() == 1:
            parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


class ValueHead(nn.Module):
    """A policy with a value head round it, as TRL wraps one."""

    def __init__(self, model, width):
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.Linear(width, 1))])


def ids(b, t, seed=0):
    return torch.randint(0, VOCABULARY, (b, t), generator=torch.Generator().manual_seed(seed))


def loss(model, input_ids, weight=1.0):
    """The summed log-loss of each next token: a sum, so that micro-batches add up."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
    return weight * nn.functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten(), reduction="sum")

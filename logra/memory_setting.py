"""What a step whose memory is asked for is run with, and the categories of its bytes: all that a reader of ledgers needs, quick to import."""

from dataclasses import dataclass
from enum import Enum

GIB = 2 ** 30
METHODS = ("dense", "logra", "lora")
LOSSES = ("chunked", "in_place", "whole", "kept")
PHASES = ("train", "probe", "update")
PROBES = ("jvp", "finite_difference", "none")
GATHERED = ("bfloat16", "float32")


@dataclass(frozen=True)
class Setting:
    """What a step is run with; the defaults are the paper's sizes with this library's code.

    method: dense (AdamW on the matrices that LoGRA sketches), logra (RowAdam) or lora (AdamW on adapters of the same matrices).
    rank; gpus: over which FSDP2 shards fp32 weights (one GPU: plain fp32 weights and autocast).
    gathered: over several GPUs, the weights' type where a layer is computed: bfloat16, or float32, a run's default (`logra.rl.config`): backward then under
        autocast, the probe in float32 throughout.
    context: tokens of a response with its prompt; micro_batch: responses in a forward, on each GPU.
    checkpointing: of every decoder layer. loss: how log-probabilities are made of logits, a layout of memory and nothing else:
        chunked (`logra.logprobs`, as the trainer does), in_place (whole fp32 logits beside bfloat16 ones, their gradient written over them), whole (log_softmax in fp32),
        kept (the same, both kinds of logits referenced until backward is over).
    probe, probe_tokens, probe_responses: the predicted-KL probe's way, and its batch on a GPU. attention, probe_attention: of Hugging Face.
    trainable: of dense, selected (those matrices) or all weights. keep_projections: A of every matrix stays in memory. resident_factor: a second d × r buffer a matrix stays in memory.
    sharded_sketches: S is reduced to row shards as backward makes it (`logra.RowShards`). share_inputs: matrices that read the same input share A. split_embedding: an
        embedding that is not the head's is gathered for its own use. selective: checkpointing keeps P (`logra.checkpointing.keep_projections`).
    """

    method: str = "logra"
    rank: int = 256
    gpus: int = 4
    context: int = 4096
    micro_batch: int = 1
    checkpointing: bool = True
    loss: str = "chunked"
    probe: str = "jvp"
    probe_tokens: int = 4096
    probe_responses: int = 1
    attention: str = "sdpa"
    probe_attention: str = "sdpa"
    trainable: str = "selected"
    keep_projections: bool = False
    resident_factor: bool = False
    sharded_sketches: bool = False
    share_inputs: bool = False
    split_embedding: bool = False
    selective: bool = False
    gathered: str = "bfloat16"

    def __post_init__(self):
        for field, known in (("method", METHODS), ("loss", LOSSES), ("probe", PROBES), ("gathered", GATHERED), ("trainable", ("selected", "all"))):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} is one of {', '.join(known)}, but it is {getattr(self, field)!r}")
        for field in ("rank", "gpus", "context", "micro_batch", "probe_tokens", "probe_responses"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is at least 1, but it is {getattr(self, field)}")


# What the paper's stack is assumed to do: the one set for all its rows (see notebooks/figures/fig1_memory.ipynb, and what rivals give).
PAPER = Setting(loss="in_place", keep_projections=True, resident_factor=True, probe_attention="eager")
# The least that this library's switches reach.
LEAST = Setting(sharded_sketches=True, share_inputs=True, split_embedding=True)


class Category(str, Enum):
    """Where a byte goes. The order is that of tables and stacked bars."""

    WEIGHTS = "weights"                                     # parameters as they are stored (a rank's shard), and buffers
    GATHERED = "gathered"                                   # parameters gathered for compute, and the buffers they travel in
    GRADIENTS = "gradients"                                 # with the buffers of their reduction
    SKETCHES = "sketches"                                   # S_dr
    OPTIMIZER = "optimizer"                                 # state, proposal U_dr, and what a step needs in between
    PROJECTIONS = "projections"                             # A_rk, and what hashing it needs in between
    ACTIVATIONS = "activations"                             # what autograd saved for backward, made again or not
    LOGITS = "logits"                                       # whatever is as wide as the vocabulary
    PROBE = "probe"                                         # the predicted-KL probe's own tensors, tangents among them
    TEMPORARIES = "temporaries"

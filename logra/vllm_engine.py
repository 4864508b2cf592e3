"""A receiver inside vLLM's workers, through its weight-transfer interface: a registered engine, and a worker extension for the rest.

    LLM(..., worker_extension_cls=EXTENSION, weight_transfer_config=WeightTransferConfig(backend=BACKEND))
    llm.init_weight_transfer_engine({"init_info": {"mode": "exact", "lost_on": "device"}})
    acknowledgement = logra.vllm_engine.apply(llm, update.to_bytes())

vLLM imports this module in every worker before the model loads. Each worker holds its own rows and columns: of U's rows in qkv_proj
and gate_up_proj, of A's columns in o_proj and down_proj; the fingerprints that decide whether an update is taken are added up over
the tensor-parallel group. Needs vLLM, which the rest of the package does not.

On the CPU, vLLM replaces each linear layer's weight by a packed copy when the model is loaded, and an update of the weight would then
change nothing. Here the layers keep their weight and multiply by it, which is 12 to 18 % slower; on GPUs nothing is repacked.
"""

from dataclasses import asdict, dataclass

import torch
import vllm.model_executor.layers.utils as layer_utils
from torch.nn import functional as F
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from logra import bits, sync

BACKEND, EXTENSION = "logra", "logra.vllm_engine.Extension"
_CONVOLUTION = "linear_attn.conv1d"                         # which vLLM keeps in a linear layer, with a weight of three dimensions


@dataclass
class InitInfo(WeightTransferInitInfo):
    """mode, lost_on: as for `logra.sync.Receiver`."""

    mode: str = "exact"
    lost_on: str = "device"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """message: bytes of `logra.wire`; the same for every rank."""

    message: bytes


class LoGRAEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Applies messages to the worker's own parameters, in place. A refusal is an outcome, not an exception: the worker goes on."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    receiver: sync.Receiver | None = None
    outcome: dict | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.receiver = sync.Receiver(None, init_info.mode, lost_on=init_info.lost_on, slots=slots(self.model), rest=rest(self.model), add_up=_add_up)

    def start_weight_update(self) -> None:
        self.outcome = None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self.outcome = asdict(self.receiver.apply(bytes(update_info.message)))
        except sync.SyncError as error:
            self.outcome = {"reason": error.reason, "detail": error.detail}

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self.receiver = None


class Extension:
    """Methods that the workers gain, for `LLM.collective_rpc`: what the weight-transfer interface has no answer for."""

    def logra_outcome(self) -> dict:
        return self.weight_transfer_engine.outcome

    def logra_state(self) -> dict:
        receiver = self.weight_transfer_engine.receiver
        return {"version": receiver.version, "run": receiver.run, "interrupted": receiver.interrupted, "weights": receiver.hash()}

    def logra_compare(self, message: bytes) -> list[int]:
        return list(self.weight_transfer_engine.receiver.compare(bytes(message)))


def apply(llm, message: bytes) -> sync.Acknowledgement:
    """Give one message to every worker of an `LLM`, and forget what its caches hold of the old weights. Raises SyncError if it is refused.

    Requests in flight are recomputed from their tokens under the new weights when they go on; their earlier tokens stay. RuntimeError
    if the ranks disagree or the prefix cache could not be reset: its entries would be of the old weights.
    """
    llm.start_weight_update()
    llm.update_weights({"update_info": {"message": message}})
    outcomes = llm.collective_rpc("logra_outcome")
    if len({(o.get("status"), o.get("version"), o.get("weights"), o.get("reason")) for o in outcomes}) > 1:
        raise RuntimeError(f"the ranks disagree about a message: {outcomes}")
    outcome = outcomes[0]
    llm.finish_weight_update(None if "reason" in outcome else str(outcome["version"]))
    if "reason" in outcome:
        raise sync.SyncError(outcome["reason"], outcome["detail"])
    if outcome["status"] == "applied" and not llm.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not reset its prefix cache after an update: the next rollout would mix two policies")
    return sync.Acknowledgement(**outcome)


def slots(model: torch.nn.Module) -> dict[str, list[sync.Slot]]:
    """What this worker holds of each matrix, by the name that it has in the Hugging Face model."""
    packed, found = getattr(model, "packed_modules_mapping", {}), {}
    for name, layer in _text(model.named_modules()):
        if not isinstance(layer, LinearBase):
            continue
        weight = layer.weight.data
        if name.endswith(_CONVOLUTION):
            if getattr(layer, "tp_size", 1) > 1:
                raise RuntimeError(f"{name} belongs to linear attention (GDN), whose parts on {layer.tp_size} tensor-parallel ranks are not known here: set engine_ranks to 1")
            continue                                        # a parameter of `rest`
        if weight.dim() != 2 or not weight.numel():
            raise RuntimeError(f"{name} has no weight to update ({tuple(weight.shape)}): it is quantised or was repacked, which is not supported")
        parent, _, last = name.rpartition(".")
        names = [f"{parent}.{part}" for part in packed.get(last, [last])]
        for part, shape in zip(*_parts(layer, names), strict=True):
            rows = part.rows.stop - part.rows.start
            found[part.name] = [sync.Slot(part, shape, weight[part.at:part.at + rows])]
    return found


def rest(model: torch.nn.Module) -> dict[str, list[sync.Slot]]:
    """What this worker holds of every other parameter, by the name that it has in the Hugging Face model.

    Biases are split and fused as their layers are, embeddings and an untied head by rows of the vocabulary, which vLLM pads; what is left
    (norms) is taken for whole on every rank.
    """
    first, packed, found = get_tp_group().rank_in_group == 0, getattr(model, "packed_modules_mapping", {}), {}
    parameters = dict(_text(model.named_parameters()))      # a tied one once, by its first name
    for name, layer in _text(model.named_modules()):
        if isinstance(layer, LinearBase) and not name.endswith(_CONVOLUTION):
            parameters.pop(f"{name}.weight", None)
        if isinstance(layer, LinearBase) and parameters.get(f"{name}.bias") is not None:
            bias, (parent, _, last) = bits.as_matrix(parameters.pop(f"{name}.bias")), name.rpartition(".")
            for part, (d, _) in zip(*_parts(layer, [f"{parent}.{x}" for x in packed.get(last, [last])]), strict=True):
                rows = part.rows.stop - part.rows.start
                counts = first if isinstance(layer, RowParallelLinear) else part.counts      # whole on every rank there
                found[f"{part.name}.bias"] = [sync.Slot(part._replace(columns=slice(0, 1), counts=counts), (d, 1), bias[part.at:part.at + rows])]
        elif isinstance(layer, VocabParallelEmbedding) and f"{name}.weight" in parameters:
            weight, own = parameters.pop(f"{name}.weight").data, layer.shard_indices
            rows, shape = slice(own.org_vocab_start_index, own.org_vocab_end_index), (layer.org_vocab_size, layer.embedding_dim)
            found[f"{name}.weight"] = [sync.Slot(bits.Part(name, rows, slice(0, shape[1])), shape, weight[:rows.stop - rows.start])]
    for name, parameter in parameters.items():
        W_dk = bits.as_matrix(parameter)
        found[name] = [sync.Slot(bits.Part(name, *(slice(0, size) for size in W_dk.shape), counts=first), tuple(W_dk.shape), W_dk)]
    return found


def _parts(layer, names) -> tuple[list[bits.Part], list[tuple[int, int]]]:
    """The layer's parts, and the shapes of the whole matrices."""
    rank, ranks, k = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1), layer.input_size
    if isinstance(layer, QKVParallelLinear):
        heads, kv_heads, size = layer.total_num_heads, layer.total_num_kv_heads, layer.head_size
        shapes = [(heads * size, k), (kv_heads * size, k), (kv_heads * size, k)]
        return bits.fused_attention(names, heads, kv_heads, size, k, rank, ranks), shapes
    if isinstance(layer, RowParallelLinear):
        return bits.row_parallel(names[0], layer.output_size, k, rank, ranks), [(layer.output_size, k)]
    if isinstance(layer, MergedColumnParallelLinear):
        sizes, more = list(layer.output_sizes), len(layer.output_sizes) - len(names)
        if more and ranks == 1:                             # q, k and v of linear attention, of which Hugging Face has one matrix
            sizes = [sum(sizes[:more + 1]), *sizes[more + 1:]]
        return bits.column_parallel(names, sizes, k, rank, ranks), [(d, k) for d in sizes]
    if isinstance(layer, ColumnParallelLinear):
        return bits.column_parallel(names, [layer.output_size], k, rank, ranks), [(layer.output_size, k)]
    (part,) = bits.column_parallel(names, [layer.output_size], k, 0, 1)      # the same on every rank
    return [part._replace(counts=get_tp_group().rank_in_group == 0)], [(layer.output_size, k)]


def _text(named):
    """(name, what), as the text model has them: of a model that sees as well, what sees left out."""
    return ((name.removeprefix("language_model."), what) for name, what in named if name.partition(".")[0] != "visual")


def _add_up(total: torch.Tensor) -> torch.Tensor:
    group = get_tp_group()
    if group.world_size > 1:
        torch.distributed.all_reduce(total, group=group.cpu_group)
    return total


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = F.linear


if not torch.cuda.is_available():
    layer_utils.dispatch_cpu_unquantized_gemm = _keep_weight
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, LoGRAEngine)

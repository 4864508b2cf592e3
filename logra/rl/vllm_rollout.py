"""Rollouts by vLLM, in the process that `logra.rl.serve` runs in; weights through `logra.vllm_engine`."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")                # this process is the engine's own
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")                       # compiling one function of the sampler takes longer than a small run

import transformers
from torch.nn.utils.rnn import pad_sequence

from logra import sync, vllm_engine
from logra.rl.bases import BASE
from logra.rl.placement import model_folder
from logra.rl.rollout import Rollout, encode, named_seed, stop_tokens

_BLOCK = 32                                                 # tokens that share a place in the prefix cache


class VLLM:
    """An engine for one model and its receiver. ranks: of tensor parallelism, each a process of its own where there is more than one.
    length: tokens of a prompt and its response at most. cache_gib: memory of each rank for keys and values."""

    def __init__(self, model: str, mode: str, dtype: str, threads: int, length: int = 1024, ranks: int = 1, cache_gib: float = 0.5):
        os.environ.setdefault("VLLM_CACHE_ROOT", str(BASE.parent.parent / "cache" / "vllm"))
        if ranks > 1 and not torch.cuda.is_available():     # vLLM's own choice of cores fails on a small machine
            cores = sorted(os.sched_getaffinity(0))
            bound = [",".join(str(cores[i % len(cores)]) for i in range(rank * threads, (rank + 1) * threads)) for rank in range(ranks)]
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(bound))
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        folder = model_folder(model)
        config = transformers.AutoConfig.from_pretrained(folder)
        self.length = length = min(length, config.get_text_config().max_position_embeddings)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.stops = stop_tokens(self.tokenizer, transformers.GenerationConfig.from_pretrained(folder))
        blind = {"language_model_only": True} if hasattr(config, "vision_config") else {}     # a folder with a vision tower: it is not loaded
        self.llm = LLM(str(folder), **blind, dtype=dtype, skip_tokenizer_init=True, generation_config="vllm", enforce_eager=not torch.cuda.is_available(), seed=0, max_model_len=length,
                       max_num_seqs=128, kv_cache_memory_bytes=int(cache_gib * (1 << 30)),
                       gpu_memory_utilization=0.01,          # no bound where the cache's size is given, but this share of the card has to be free, also beside a trainer
                       block_size=_BLOCK, logprobs_mode="processed_logprobs", tensor_parallel_size=ranks,
                       distributed_executor_backend="mp" if ranks > 1 else None,     # within Ray as well, where vLLM would choose Ray
                       worker_extension_cls=vllm_engine.EXTENSION, weight_transfer_config=WeightTransferConfig(backend=vllm_engine.BACKEND))
        self.llm.init_weight_transfer_engine({"init_info": {"mode": mode, "lost_on": "device"}})

    def generate(self, prompts, seed, max_new_tokens, temperature, version, places=None, top_p=1.0) -> Rollout:
        """As `rollout.generate` does; `seed` and a prompt's place decide its draws (places: in the batch that these are a part of). Raises
        SyncError if the weights are not those of `version` (None: whichever they are)."""
        from vllm import SamplingParams

        state = self.llm.collective_rpc("logra_state")[0]
        if version is not None and (state["interrupted"] is not None or state["run"] is None or state["version"] != version):
            raise sync.SyncError("gap", f"the rollout engine holds {state}, wanted version {version}")
        inputs = encode(self.tokenizer, prompts)
        tokens = [ids[mask.bool()].tolist() for ids, mask in zip(inputs.input_ids, inputs.attention_mask)]
        sampling = [SamplingParams(temperature=temperature, top_p=top_p, seed=named_seed(seed, place), max_tokens=min(max_new_tokens, self.length - len(ids)), logprobs=0,
                                   stop_token_ids=self.stops, detokenize=False) for place, ids in zip(places or range(len(tokens)), tokens)]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in tokens], sampling, use_tqdm=False)
        answers = [output.outputs[0] for output in outputs]
        rows = [torch.tensor([*ids, *answer.token_ids]) for ids, answer in zip(tokens, answers)]
        masks = [torch.arange(len(row)) >= len(ids) for row, ids in zip(rows, tokens)]
        logprobs = [torch.tensor([0.0] * len(ids) + [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids)])
                    for ids, answer in zip(tokens, answers)]
        return Rollout(pad_sequence(rows, batch_first=True, padding_value=self.tokenizer.pad_token_id),
                       pad_sequence([torch.ones_like(row) for row in rows], batch_first=True), pad_sequence(masks, batch_first=True),
                       pad_sequence(logprobs, batch_first=True), torch.tensor([answer.finish_reason == "stop" for answer in answers]),
                       [self.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True) for answer in answers])

    def apply(self, message: bytes) -> sync.Acknowledgement:
        return vllm_engine.apply(self.llm, message)

    def compare(self, message: bytes) -> tuple[int, int]:
        return tuple(self.llm.collective_rpc("logra_compare", args=(message,))[0])

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

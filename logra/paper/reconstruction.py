"""Figure 5(b, c): the cosine between a policy gradient and its reconstruction from a sketch (Section 3.4.1, Appendix D.3).

A pretrained model answers verifiable prompts, the responses are scored, and the dense policy gradient G of every attention and MLP
matrix is taken for several minibatches. Each G meets projections of four conditions, each with several seeds and ranks:

    fixed        signs, the same for every minibatch          rademacher   signs, redrawn for every minibatch
    gaussian     normal entries, redrawn                      hadamard     orthogonal rows, redrawn

`measure` gives one row for each matrix, minibatch, condition, rank and seed. Only cosines are kept: gradients never leave memory.
"""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from logra import projection, theory
from logra.rl import loss, models, rewards
from logra.rl.chat import QUESTION, last_number_is
from logra.rl.records import cores
from logra.rl.tasks import Problem

CONDITIONS = {"fixed": "rademacher", "rademacher": "rademacher", "gaussian": "gaussian", "hadamard": "hadamard"}
MATRIX = re.compile(r"\blayers\.(\d+)\.(?:self_attn|mlp)\.(\w+_proj)$")
# Qwen2.5-Math-1.5B, the model of the paper's figure: {matrix: (d, k)} of each of its 28 layers.
QWEN_SHAPES = {
    "q_proj": (1536, 1536), "k_proj": (256, 1536), "v_proj": (256, 1536), "o_proj": (1536, 1536),
    "gate_proj": (8960, 1536), "up_proj": (8960, 1536), "down_proj": (1536, 8960),
}  # fmt: skip
QWEN_LAYERS = 28


@dataclass(frozen=True)
class Settings:
    """What is measured; the same settings on the same machine give the same table."""

    model: str = models.SMOLLM2
    minibatches: int = 4             # that have a gradient; see `measure`
    responses: int = 32              # a minibatch, one for each prompt
    max_new_tokens: int = 24         # a response that is longer is cut, and judged as it stands
    ranks: tuple[int, ...] = (4, 16, 64, 256)
    conditions: tuple[str, ...] = tuple(CONDITIONS)
    projection_seeds: int = 8
    seed: int = 1                    # of the prompts and of sampling
    micro_batch: int = 16            # responses a backward pass


class DigitSums:
    """What is a + b? with both digits 1 to 9. A response is correct when the last number in it is the sum."""

    name = "digit_sums"

    def __init__(self, seed: int = 0):
        self.seed = seed

    def size(self, split: str) -> None:
        return None

    def problem(self, split: str, index: int) -> Problem:
        draws = random.Random(f"{self.name}/{self.seed}/{split}/{index}")
        a, b = draws.randint(1, 9), draws.randint(1, 9)
        return Problem(QUESTION.format(f"{a} + {b}"), str(a + b), self.name, index)

    def verify(self, response: str, problem: Problem) -> float:
        return last_number_is(response, problem.answer)


def add_gradients(model, rollout, advantages: torch.Tensor, micro_batch: int) -> None:
    """Adds to the weights' .grad the dense gradient of the policy loss, its mean taken over the minibatch's generated tokens."""
    tokens = int(rollout.response_mask.sum())
    for first in range(0, len(rollout), micro_batch):
        rows = slice(first, first + micro_batch)
        part = rollout[rows]
        logprobs = loss.token_logprobs(model, part.input_ids, part.attention_mask, part.response_mask)
        loss.policy_loss(logprobs, part, advantages[rows], tokens).backward()


def compact(G_dk: torch.Tensor) -> torch.Tensor:
    """R with RᵀR = GᵀG, scaled to ‖R‖ = 1, and at most k rows: all of G that a cosine and an effective rank depend on.

    Raises ValueError when G is zero or not finite.
    """
    norm = G_dk.norm()
    if not (norm.isfinite() and norm > 0):
        raise ValueError(f"the gradient has norm {norm.item()}: a cosine needs a finite one above 0")
    R_dk = G_dk / norm
    return R_dk if R_dk.shape[0] <= R_dk.shape[1] else torch.linalg.qr(R_dk, mode="r").R


def concentration(R_dk: torch.Tensor) -> dict[str, float]:
    """What `theory.cosine_shortfall` asks about a gradient, from its `compact` form: effective_rank and diagonal."""
    return {
        "effective_rank": 1.0 / (R_dk @ R_dk.T).double().square().sum().item(),
        "diagonal": R_dk.square().sum(0).double().square().sum().item(),
    }


def reconstruction_cosines(R_dk: torch.Tensor, A_srk: torch.Tensor, ranks) -> torch.Tensor:
    """cos(G, G AᵀA) of Appendix D.3 for every seed s and rank: float64 [seeds, ranks], without forming G AᵀA.

    R_dk: the gradient, `compact`. A_srk: unscaled entries at the largest rank. A projection of a smaller rank is its first rows,
    since an entry depends on its key and place alone, and a cosine does not depend on A's scale. With S = R Aᵀ,
    ⟨G, Ĝ⟩ = tr(SᵀS) and ‖Ĝ‖² = tr((SᵀS)(A Aᵀ)), each over the leading rank × rank block.
    """
    seeds, rank, k = A_srk.shape
    S_sdr = (R_dk @ A_srk.reshape(-1, k).T).view(-1, seeds, rank).transpose(0, 1)
    SS_srr = (S_sdr.mT @ S_sdr).double()
    AA_srr = (A_srk @ A_srk.mT).double()
    inner_sr = SS_srr.diagonal(dim1=1, dim2=2).cumsum(-1)
    return torch.stack([
        inner_sr[:, r - 1] / (SS_srr[:, :r, :r] * AA_srr[:, :r, :r]).sum((1, 2)).sqrt() for r in ranks
    ], dim=1)  # fmt: skip


def compare(name: str, R_dk: torch.Tensor, conditions, minibatch: int, ranks, seeds: int) -> pd.DataFrame:
    """The cosines of one matrix's gradient: a row for each condition, projection_seed (1 … seeds) and rank.

    A fixed projection has the key of update 0; a refreshed one that of its minibatch, counted from 1.
    """
    ranks, tables = list(ranks), []
    for condition in conditions:
        update = 0 if condition == "fixed" else minibatch
        A_srk = torch.stack([
            projection.entries(CONDITIONS[condition], max(ranks), R_dk.shape[1], projection.key(seed, update, name))
            for seed in range(1, seeds + 1)
        ])  # fmt: skip
        cosine = reconstruction_cosines(R_dk, A_srk, ranks).flatten().numpy()
        tables.append(pd.DataFrame({
            "condition": condition, "projection_seed": np.repeat(range(1, seeds + 1), len(ranks)),
            "rank": np.tile(ranks, seeds), "cosine": cosine,
        }))  # fmt: skip
    return pd.concat(tables).assign(minibatch=minibatch)


def measure(settings: Settings, progress: bool = True) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Three tables: cosines, gradients (matrix by minibatch) and responses.

    The advantage is reward minus the minibatch's mean reward: a single model state has no history for a running baseline. When all
    rewards of a minibatch are equal, its gradient is zero and there is no cosine: it is left out, its responses stay in the table
    with `used` False, and the next prompts are drawn. Raises RuntimeError when that happens to nine of ten.
    """
    from logra.rl import rollout                             # with transformers: where nothing is measured, nobody waits for it

    model, tokenizer = models.load(settings.model)
    matrices = {name: module.weight for name, module in model.named_modules() if MATRIX.search(name)}
    model.requires_grad_(False)
    for weight in matrices.values():
        weight.requires_grad_(True)
    task = DigitSums(settings.seed)
    cosines, gradients, responses = [], [], []
    bar = tqdm(total=settings.minibatches * len(matrices), desc="cosines", disable=not progress, mininterval=10)
    drawn = used = 0
    while used < settings.minibatches:
        if drawn == 10 * settings.minibatches:
            raise RuntimeError(f"only {used} of {drawn} minibatches had rewards that differ; raise `responses` (now {settings.responses})")
        problems = [task.problem("train", drawn * settings.responses + row) for row in range(settings.responses)]
        drawn += 1
        sampled = rollout.generate(
            model, tokenizer, [problem.prompt for problem in problems],
            rollout.named_seed("responses", settings.seed, drawn), settings.max_new_tokens,
        )  # fmt: skip
        reward_b = torch.tensor(rewards.score(task, problems, sampled.texts).rewards)
        differ = bool((reward_b != reward_b[0]).any())
        responses.append(pd.DataFrame({
            "draw": drawn, "used": differ, "prompt": [problem.prompt for problem in problems], "response": sampled.texts,
            "tokens": sampled.response_mask.sum(1), "ended": sampled.complete, "reward": reward_b,
        }))  # fmt: skip
        if not differ:
            continue
        used += 1
        add_gradients(model, sampled, reward_b - reward_b.mean(), settings.micro_batch)

        def one(name: str, weight: torch.nn.Parameter) -> tuple[dict, pd.DataFrame]:
            G_dk, weight.grad = weight.grad, None
            layer, matrix = MATRIX.search(name).groups()
            place = {"layer": int(layer), "matrix": matrix, "d": G_dk.shape[0], "k": G_dk.shape[1]}
            R_dk = compact(G_dk)
            return ({**place, "minibatch": used, "norm": G_dk.norm().item(), **concentration(R_dk)},
                    compare(name, R_dk, settings.conditions, used, settings.ranks, settings.projection_seeds).assign(**place))

        with ThreadPoolExecutor(cores()) as pool:            # matrices side by side, each on one thread: its sums do not depend on the machine
            for gradient, table in pool.map(one, *zip(*matrices.items())):
                gradients.append(gradient)
                cosines.append(table)
                bar.update()
    bar.close()
    return pd.concat(cosines, ignore_index=True), pd.DataFrame(gradients), pd.concat(responses, ignore_index=True)


def cells(cosines: pd.DataFrame, gradients: pd.DataFrame) -> pd.DataFrame:
    """The heatmaps' cells from `measure`'s tables: a row for each condition, rank and layer, its seven matrices averaged as in D.3.

    measured         mean cosine over matrices, minibatches and projection seeds
    standard_error   of that mean, from the spread over projection seeds (minibatches under one fixed projection are no repeats)
    closed_form      mean of `theory.expected_cosine` over the matrices: shapes alone
    with_gradient    the same less `theory.cosine_shortfall` of the gradients that were met
    """
    place = ["condition", "rank", "layer"]
    by_seed = cosines.groupby([*place, "projection_seed"])["cosine"].mean().groupby(place)
    cell = pd.DataFrame({"measured": by_seed.mean(), "standard_error": by_seed.std() / by_seed.count() ** 0.5})
    forms = []
    for condition, rank in cosines[["condition", "rank"]].drop_duplicates().itertuples(index=False):
        kind = CONDITIONS[condition]
        form = gradients.assign(condition=condition, rank=rank)
        form["closed_form"] = [theory.expected_cosine(kind, rank, k) for k in form["k"]]
        form["with_gradient"] = form["closed_form"] * [
            1 - theory.cosine_shortfall(kind, rank, e, diagonal) for e, diagonal in zip(form["effective_rank"], form["diagonal"])
        ]  # fmt: skip
        forms.append(form.groupby(place)[["closed_form", "with_gradient"]].mean())
    return cell.join(pd.concat(forms)).reset_index()


def measure_shapes(shapes: dict[str, tuple[int, int]], outer_products: int, ranks, conditions, seeds: int, seed: int = 1) -> pd.DataFrame:
    """The same cosines for random gradients of given shapes, {matrix: (d, k)}: columns gradient, matrix, d, k and those of `compare`.

    Two gradients for each shape: `dense` with independent normal entries, and `low rank`, the sum of `outer_products` random ones.
    """
    from logra.rl import rollout

    tables = []
    for matrix, (d, k) in shapes.items():
        draws = torch.Generator().manual_seed(rollout.named_seed("random gradient", seed, matrix))
        left_de, right_ek = torch.randn(d, outer_products, generator=draws), torch.randn(outer_products, k, generator=draws)
        low_ek = torch.linalg.qr(left_de, mode="r").R @ right_ek                    # has the GᵀG of left · right, in few rows
        for gradient, G_dk in (("dense", torch.randn(d, k, generator=draws)), ("low rank", low_ek)):
            table = compare(f"{gradient}/{matrix}", compact(G_dk), conditions, 1, ranks, seeds)
            tables.append(table.assign(gradient=gradient, matrix=matrix, d=d, k=k))
    return pd.concat(tables, ignore_index=True)


def closed_form(shapes: dict[str, tuple[int, int]], condition: str, rank: int) -> float:
    """The mean of `theory.expected_cosine` over the matrices of a layer, {matrix: (d, k)}: what a heatmap's cell should hold."""
    return sum(theory.expected_cosine(CONDITIONS[condition], rank, k) for _, k in shapes.values()) / len(shapes)

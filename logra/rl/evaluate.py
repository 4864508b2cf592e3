"""Evaluation (C.1): several samples a problem; Pass@1 over all of them, Pass@k where any of a problem's k is correct."""

from collections.abc import Sequence

import numpy as np
import torch

from logra.rl import rewards
from logra.rl.rollout import generate, named_seed

_BATCH = 512                                                # responses generated at a time
_LEVEL = 0.95                                               # of the bootstrap intervals


def sampler(model, tokenizer, config):
    """sample(prompts, seed) of `evaluate`, by a model's own weights."""
    def sample(prompts, seed):
        return generate(model, tokenizer, prompts, seed, config.max_new_tokens, config.evaluation_temperature, config.evaluation_top_p, recorded=False, length=config.context)

    return sample


def evaluate(sample, task, config, update: int, led=lambda work: work()) -> dict:
    """One row of `evaluations.parquet`, see `summary`. sample(prompts, seed) -> Rollout: one response a prompt. led: over ranks, `Ranks.led`:
    all sample in step, and one of them scores.

    The problems are the first `evaluation_prompts` of the task's evaluation split, the same at every update.
    """
    size = task.size("evaluation")
    count = config.evaluation_prompts if size is None else min(size, config.evaluation_prompts)
    problems = [task.problem("evaluation", i) for i in range(count) for _ in range(config.evaluation_samples)]
    scores, lengths, complete, counts = [], [], [], {}
    for start in range(0, len(problems), _BATCH):
        part = problems[start:start + _BATCH]
        out = sample([p.prompt for p in part], named_seed(config.seed, "evaluate", update, start))
        scored = led(lambda: rewards.score(task, part, out.texts, binary=False, limit=config.verifier_seconds))
        scores += scored.rewards
        for name, number in scored.metrics().items():
            counts[name] = counts.get(name, 0) + number
        lengths.append(out.response_mask.sum(1))
        complete.append(out.complete)
    tasks = [problem.task for problem in problems[::config.evaluation_samples]]
    score = torch.tensor(scores, dtype=torch.float64).view(count, config.evaluation_samples)
    seed = named_seed(config.seed, "bootstrap", update)
    return {"update": update} | summary(score, tasks, torch.cat(lengths), torch.cat(complete), counts, config.evaluation_resamples, seed)


def summary(score: torch.Tensor, tasks: Sequence[str], lengths: torch.Tensor, complete: torch.Tensor, counts: dict, resamples: int = 0, seed: int = 0) -> dict:
    """pass_at_1, pass_at_k, score (the verifier's, partial credit included), length (generated tokens a response), truncated (share
    that did not end by itself), samples, and the verifier's counts. Where the problems are of several tasks, also each task's mean
    score as score/<task>, and macro, the mean of these (C.2).

    score: float64 [problems, k]. tasks: each problem's. lengths, complete: [problems · k]. counts: see `rewards.Scores.metrics`.
    resamples: with bootstrap intervals of pass_at_1, pass_at_k, score and macro, as <name>_low and <name>_high, from so many resamples.
    """
    right = score >= 1
    row = {"pass_at_1": float(right.double().mean()), "pass_at_k": float(right.any(1).double().mean()),
           "score": float(score.mean()), "length": float(lengths.double().mean()),
           "truncated": float((~complete).double().mean()), "samples": score.numel(), **counts}
    groups = {name: score[[task == name for task in tasks]] for name in sorted(set(tasks))}
    if len(groups) > 1:
        means = {name: float(group.mean()) for name, group in groups.items()}
        row |= {"macro": sum(means.values()) / len(means), **{f"score/{name}": mean for name, mean in means.items()}}
    if resamples:
        row |= _interval("pass_at_1", [right.double().mean(1)], resamples, seed)
        row |= _interval("pass_at_k", [right.any(1).double()], resamples, seed)
        row |= _interval("score", [score.mean(1)], resamples, seed)
        if len(groups) > 1:
            row |= _interval("macro", [group.mean(1) for group in groups.values()], resamples, seed)
    return row


def _interval(name: str, groups: list[torch.Tensor], resamples: int, seed: int) -> dict:
    """The 95 % percentile interval of the mean of the groups' means. Problems are resampled, within their group: a problem's samples are not independent."""
    from scipy.stats import bootstrap                       # takes long to import, and the small learner's runs ask for no interval

    def mean_of_means(*values, axis):
        return np.mean([value.mean(axis) for value in values], axis=0)

    found = bootstrap([group.numpy() for group in groups], mean_of_means, n_resamples=resamples, vectorized=True, confidence_level=_LEVEL,
                      method="percentile", rng=np.random.default_rng(seed), batch=200).confidence_interval
    return {f"{name}_low": float(found.low), f"{name}_high": float(found.high)}

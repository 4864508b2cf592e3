"""Evaluation (C.1): several samples a problem; Pass@1 over all of them, Pass@k where any of a problem's k is correct."""

import torch

from logra.rl import rewards
from logra.rl.rollout import generate, named_seed

_BATCH = 512                                                # responses generated at a time


def evaluate(model, tokenizer, task, config, update: int) -> dict:
    """One row of `evaluations.parquet`: pass_at_1, pass_at_k, score (the verifier's, partial credit included), length (generated
    tokens a response), truncated (share that did not end by itself), samples, verifier_failures. Where the problems are of several
    tasks (`mixture.Mixture`), also each task's mean score as score/<task>, and macro, the mean of these (C.2).

    The problems are the first `evaluation_prompts` of the task's evaluation split, the same at every update.
    """
    size = task.size("evaluation")
    count = config.evaluation_prompts if size is None else min(size, config.evaluation_prompts)
    problems = [task.problem("evaluation", i) for i in range(count) for _ in range(config.evaluation_samples)]
    scores, lengths, complete, failures = [], [], [], 0
    for start in range(0, len(problems), _BATCH):
        part = problems[start:start + _BATCH]
        out = generate(model, tokenizer, [p.prompt for p in part], named_seed(config.seed, "evaluate", update, start),
                       config.max_new_tokens, config.evaluation_temperature, config.evaluation_top_p, recorded=False)
        scored = rewards.score(task, part, out.texts, binary=False)
        scores += scored.rewards
        failures += scored.failures
        lengths.append(out.response_mask.sum(1))
        complete.append(out.complete)
    score = torch.tensor(scores, dtype=torch.float64).view(count, config.evaluation_samples)
    right = score >= 1
    row = {"update": update, "pass_at_1": float(right.double().mean()), "pass_at_k": float(right.any(1).double().mean()),
           "score": float(score.mean()), "length": float(torch.cat(lengths).double().mean()),
           "truncated": float((~torch.cat(complete)).double().mean()), "samples": score.numel(), "verifier_failures": failures}
    tasks = [problem.task for problem in problems[::config.evaluation_samples]]
    if len(set(tasks)) > 1:
        means = {name: float(score[[task == name for task in tasks]].mean()) for name in sorted(set(tasks))}
        row |= {"macro": sum(means.values()) / len(means), **{f"score/{name}": mean for name, mean in means.items()}}
    return row

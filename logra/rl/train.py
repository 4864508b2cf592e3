"""The training loop: one update a batch, from prompts to a row of metrics (Algorithm 1).

    python -m logra.rl.train CONFIG.yaml [--folder RECORD] [--resume]
    torchrun --nproc-per-node 4 -m logra.rl.train CONFIG.yaml ...       the same over N ranks: see `rl.ranks`

A run's folder holds config.json, environment.json, metrics.parquet and timings.parquet (one row an update; the latter with `peak_gib`, the most
that a training GPU had allocated in its training call, and `evaluation`, the seconds of one that followed), evaluations.parquet;
while it runs, log.jsonl, and checkpoints (`rl.checkpoint`) from which --resume goes on bit for bit, or on another number of ranks. --wall-clock,
SIGTERM and SIGUSR1 end it with a checkpoint (`rl.stopping` has the exit codes). `rl.logs` shows it while it runs.
"""

import argparse
import json
import math
import os
import platform
import shutil
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import yaml

import logra
from logra.checkpointing import keep_projections
from logra.rl import rewards, stopping
from logra.rl.bases import base_sha256
from logra.rl.checkpoint import Checkpoints
from logra.rl.config import RunConfig
from logra.rl.evaluate import evaluate, sampler
from logra.rl.logs import Logs, update_of
from logra.rl.loss import policy_loss, token_logprobs
from logra.rl.methods import Dense, LoGRA, LoRA
from logra.rl.placement import base_model
from logra.rl.ranks import Alone, Ranks, launched, whole_tensor
from logra.rl.records import records_root, to_disk, write_whole
from logra.rl.rollout import deterministic, named_seed
from logra.rl.stopping import Limit, Stopped
from logra.rl.tasks import task as make_task
from logra.shards import own_rows


class Trainer:
    """A run in one process, or this rank's part of one over N ranks. `step()` makes one update and returns its metrics; `state_dict()` is
    all that the next one depends on, for any number of ranks."""

    def __init__(self, config: RunConfig, ranks: Alone | Ranks = Alone()):
        self.config, self.ranks = config, ranks
        self.model, self.tokenizer = base_model(config.model)
        self.task = make_task(config.task, **config.task_config)
        self.method = {"logra": LoGRA, "dense": Dense, "lora": LoRA}[config.method](self.model, config, ranks)
        if config.checkpointing:
            kept = {"context_fn": keep_projections} if config.checkpoint_projections else {}
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kept})
        self.rollout = ranks.place(config, self.model, self.tokenizer, self.method)
        self.update, self.baseline, self.equal = 0, 0.0, 0   # equal: batches in a row of one reward alone
        self.skipped = self.bad = 0                         # updates not made, in all and in a row until now
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}                  # peak_gib of the last update's training call, on GPUs
        self._row: dict = {}                                # what is known of the update that is being made

    @contextmanager
    def _timed(self, part: str):
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def step(self) -> dict:
        """One update: sample, score, accumulate, propose, scale, apply. Raises FloatingPointError for a loss, a sketch or a
        predicted KL that is not finite, with the weights unchanged."""
        config, u = self.config, self.update + 1
        self.seconds, self.memory = {}, {}
        first = (u - 1) * config.prompts
        problems = [self.task.problem("train", first + i) for i in range(config.prompts)]
        with self._timed("rollout"):
            batch = self.rollout.generate([p.prompt for p in problems], named_seed(config.seed, "rollout", u), config.max_new_tokens, config.temperature)
        with self._timed("reward"):
            scores = self.ranks.led(lambda: rewards.score(self.task, problems, batch.texts, config.incorrect_reward, config.binary_reward, config.verifier_seconds))
        reward = torch.tensor(scores.rewards)
        advantages = (reward - self.baseline).to(batch.input_ids.device)
        tokens = int(batch.response_mask.sum())
        counted = batch.input_ids.is_cuda
        if counted:
            torch.cuda.reset_peak_memory_stats()
        with self._timed("train"):
            self.model.train()
            loss, logprobs = self._backward(batch, advantages, tokens)
            self.model.eval()
        row = {"update": u, "reward": float(reward.mean()), "baseline": self.baseline, "loss": loss,
               "length": tokens / len(batch), "truncated": float((~batch.complete).double().mean()), "tokens": tokens,
               **scores.metrics(), "mismatch": float((batch.logprobs[batch.response_mask] - logprobs).double().mean())}
        self._row = dict(row)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss of update {u} is {loss}: nothing was applied")
        self.equal, warning = rewards.all_equal(scores, self.equal)
        row |= warning | self.method.update(self._timed, batch, logprobs)
        if counted:                                         # the training call (3.4.2): backward, probe, update; the rank that needed most
            self.memory = {"peak_gib": self.ranks.most(torch.cuda.max_memory_allocated() / 2 ** 30)}
        if config.sync != "none":
            row |= self.rollout.publish(self.method.applied)
            self.seconds["sync"] = self.rollout.seconds
        self.baseline = config.baseline_decay * self.baseline + (1 - config.baseline_decay) * float(reward.mean())
        self.update, self.bad = u, 0
        return row

    def advance(self) -> dict:
        """`step`; or, where that meets a number that is not finite, the row of an update that was not made: its prompts are used up, all else is as
        before. A run without one has no column `skipped`, their number until then."""
        try:
            row = self.step()
        except FloatingPointError as error:
            self.method.discard()
            self.update, self.skipped, self.bad, row = self.update + 1, self.skipped + 1, self.bad + 1, self._row
            if self.ranks.number == 0:
                print(f"update {self.update} is skipped, {self.bad} in a row: {error}", file=sys.stderr, flush=True)
        return row | ({"skipped": self.skipped} if self.skipped else {})

    def go_back(self) -> bool:
        """To after the last update that was made. Returns whether its weights are finite."""
        self.update, self.skipped, self.bad = self.update - self.bad, self.skipped - self.bad, 0
        broken = sum(not torch.isfinite(own_rows(x).local).all() for x in self.model.state_dict().values() if x.dim())
        return self.ranks.total(float(broken)) == 0

    def _backward(self, batch, advantages, tokens) -> tuple[float, torch.Tensor]:
        """Every micro-batch's backward: the batch's loss, and log π of its generated tokens. tokens: of the whole batch, whichever rank has them."""
        config, device = self.config, batch.input_ids.device.type

        def forward(rows, micro):
            with torch.autocast(device, torch.bfloat16, enabled=config.compute == "bfloat16"):
                logprob = token_logprobs(self.model, micro.input_ids, micro.attention_mask, micro.response_mask, config.temperature)
            return policy_loss(logprob, micro, advantages[rows], tokens, config.importance_cap), logprob.detach()

        loss, parts = 0.0, []
        for rows, micro in self.ranks.micro_batches(batch, config.micro_batch):
            share, logprob = self.ranks.run(forward, rows, micro)
            share.backward()
            loss += share.item()
            parts.append((rows, micro, logprob))
        return self.ranks.total(loss), self.ranks.joined(batch, parts)

    def evaluate(self) -> dict:
        """One row of evaluations: vLLM's engines sample where there are some, else the trainer's own weights, all ranks in step; rank 0 scores."""
        config = self.config
        self.model.eval()

        own = sampler(self.model, self.tokenizer, config)

        def sample(prompts, seed):
            if config.rollout in ("vllm", "ray"):
                return self.rollout.generate(prompts, seed, config.max_new_tokens, config.evaluation_temperature, top_p=config.evaluation_top_p)
            return self.ranks.run(own, prompts, seed)

        return evaluate(sample, self.task, config, self.update, self.ranks.led)

    def state_dict(self) -> dict:
        """All that the next update depends on; over N ranks, this one's rows of it."""
        return {"update": self.update, "baseline": self.baseline, "equal": self.equal, "skipped": self.skipped, "bad": self.bad,
                "model": self.model.state_dict(), "method": self.method.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.update, self.baseline, self.equal, self.skipped, self.bad = (state[name] for name in ("update", "baseline", "equal", "skipped", "bad"))
        self.model.load_state_dict(state["model"])
        self.method.load_state_dict(state["method"])


def run(config: RunConfig, folder: Path, resume: bool = True, limit: Limit | None = None, shown: bool = False) -> Path:
    """Make the record of one run in `folder`, from its checkpoint if there is one and `resume` is on. Returns the folder.

    Where a process group exists its ranks do this together, each calling it with the same arguments; they see the same folder, and rank 0 writes.
    limit: when to stop, with a checkpoint. shown: to TensorBoard and W&B as well, see `rl.logs`.
    Raises FileExistsError if the folder holds another run, or this one when resume is off; Stopped at the limit, or after three updates in a
    row that could not be made, with a checkpoint of the last good state.
    """
    ranks = Ranks() if dist.is_initialized() else Alone()
    folder = Path(folder)
    if ranks.led(lambda: _begun(config, folder, resume)):
        return folder
    torch.set_num_threads(config.threads)
    deterministic()
    trainer, checkpoints, log, limit = Trainer(config, ranks), Checkpoints(folder, ranks), folder / "log.jsonl", limit or Limit()
    rows = _restore(trainer, checkpoints, log)
    if ranks.number == 0:
        write_whole(folder / "environment.json", json.dumps(_environment(config, folder, ranks.count, trainer.task), indent=1) + "\n")
    logs = Logs(config, folder, trainer.update) if shown and ranks.number == 0 else None
    start, done, saved = time.perf_counter(), trainer.update, trainer.update
    longest = max((row["total"] + row.get("evaluation", 0.0) for row in rows if row["kind"] == "timings"), default=0.0)     # of a resume: before its first update too
    with (log if ranks.number == 0 else Path(os.devnull)).open("a") as stream:
        def note(kind, row):
            rows.append({"kind": kind, **row})
            stream.write(json.dumps(rows[-1]) + "\n")
            stream.flush()
            if logs is not None:
                logs(kind, row)

        def save():
            nonlocal saved
            if saved != trainer.update:
                if ranks.number == 0:
                    os.fsync(stream.fileno())               # a checkpoint counts only with the rows up to it, and rank 0 makes it count
                checkpoints.save(trainer.update, trainer.state_dict())
                saved = trainer.update

        def stop_in_time():
            if why := ranks.led(lambda: limit.reached(longest)):
                save()
                raise Stopped(stopping.GO_ON, why, trainer.update)

        def evaluated():
            began = time.perf_counter()
            note("evaluation", trainer.evaluate())
            return time.perf_counter() - began

        try:
            if not any(row["kind"] == "evaluation" for row in rows):
                stop_in_time()
                longest = evaluated()
            while trainer.update < config.updates:
                stop_in_time()
                began = time.perf_counter()
                row = trainer.advance()
                note("metrics", row)
                spent = {"number": trainer.update, **trainer.seconds, **trainer.memory, "total": time.perf_counter() - began}     # `update` is a part's seconds
                due = trainer.update % config.evaluate_every == 0 and trainer.update >= config.evaluate_from
                if due or trainer.update == config.updates:
                    spent["evaluation"] = evaluated()       # beside the total, which is the update's
                note("timings", spent)
                if trainer.bad == stopping.BAD_IN_A_ROW:
                    if trainer.go_back():
                        save()
                    raise Stopped(stopping.NOT_FINITE, f"{stopping.BAD_IN_A_ROW} updates in a row met numbers that are not finite", trainer.update)
                if trainer.update % config.checkpoint_every == 0 and not trainer.bad:
                    save()
                if trainer.update in config.keep_weights_at:
                    _keep_weights(trainer, folder / f"weights-{trainer.update:06d}")
                longest = max(longest, time.perf_counter() - began)
                rate = (time.perf_counter() - start) / (trainer.update - done)
                _progress(row, trainer, rate * (config.updates - trainer.update), rows)
        except KeyboardInterrupt:
            if ranks.number == 0:
                print(f"\nstopped after update {trainer.update} of {config.updates}; --resume goes on from the last checkpoint", file=sys.stderr)
            raise
        except Stopped as stopped:
            checkpoints.wait()
            told = {"code": stopped.code, "why": stopped.why, "update": stopped.update}
            ranks.led(lambda: write_whole(folder / "stopped.json", json.dumps(told) + "\n"))     # all wait: torchrun ends the others when one has ended
            raise
        finally:
            trainer.rollout.close()
            if logs is not None:
                logs.close()
    checkpoints.wait()
    ranks.led(lambda: _complete(folder, rows, log, trainer.update))
    return folder


def _begun(config: RunConfig, folder: Path, resume: bool) -> bool:
    """Make the folder, or find it; whether the record in it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.model_dump(), indent=1, sort_keys=True) + "\n"
    written = folder / "config.json"
    if written.exists() and (not resume or not config.same_run(json.loads(written.read_text()))):
        raise FileExistsError(f"{folder} holds {'another' if resume else 'a'} run: give another folder, or --resume to go on with the same configuration")
    if (folder / "metrics.parquet").exists():
        return True
    write_whole(written, text)
    (folder / "stopped.json").unlink(missing_ok=True)
    for cut_off in (folder / "checkpoint").glob(".*.aside"):
        shutil.rmtree(cut_off, ignore_errors=True)
    return False


def _complete(folder: Path, rows: list[dict], log: Path, update: int) -> None:
    _refuse_lost(rows, log, update)
    for kind, name in (("evaluation", "evaluations"), ("timings", "timings"), ("metrics", "metrics")):   # metrics last: it marks the record as whole
        frame = pd.DataFrame([row for row in rows if row["kind"] == kind]).drop(columns="kind")
        frame.to_parquet(folder / f".{name}.aside")
        to_disk(folder / f".{name}.aside")
        (folder / f".{name}.aside").replace(folder / f"{name}.parquet")
    to_disk(folder)                                         # before what the record could be made of again goes
    log.unlink()
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def _keep_weights(trainer: Trainer, folder: Path) -> None:
    """The whole float32 weights, as a folder that `models.load` reads."""
    from safetensors.torch import save_file

    tied = (trainer.model._tied_weights_keys or ()) if trainer.model.config.tie_word_embeddings else ()
    whole = {}
    for name, x in trainer.model.state_dict().items():
        tensor = whole_tensor(x)
        if trainer.ranks.number == 0 and name not in tied:
            whole[name] = tensor.cpu().contiguous()
    if trainer.ranks.number == 0:
        aside = folder.with_name(f".{folder.name}.aside")
        trainer.model.config.save_pretrained(aside)
        trainer.model.generation_config.save_pretrained(aside)
        trainer.tokenizer.save_pretrained(aside)
        save_file(whole, aside / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)           # of an update that was gone back on
        aside.rename(folder)


def _restore(trainer: Trainer, checkpoints: Checkpoints, log: Path) -> list[dict]:
    """Load the checkpoint, if there is one, and the rows up to it; what was logged after it is made again."""
    state = checkpoints.load({f"model/{name}": x for name, x in trainer.model.state_dict().items()})
    if state is not None:
        trainer.load_state_dict(state)

    def kept():
        log.touch()
        rows, size = [], 0
        for line in log.read_bytes().splitlines(keepends=True) if state is not None else ():
            if not line.endswith(b"}\n"):                   # cut off
                break
            row = json.loads(line)
            if update_of(row["kind"], row) > trainer.update:
                break
            rows.append(row)
            size += len(line)
        _refuse_lost(rows, log, trainer.update)
        os.truncate(log, size)                              # what is kept is not written again: a kill here, or a full disk, loses none of it
        return rows

    return trainer.ranks.led(kept)


def _refuse_lost(rows: list[dict], log: Path, update: int) -> None:
    """Raises ValueError unless there is one row of metrics and one of timings for each update up to this one: a record with a gap must not pass for whole."""
    for kind in ("metrics", "timings"):
        found = [update_of(kind, row) for row in rows if row["kind"] == kind]
        if found != list(range(1, update + 1)):
            lost = sorted(set(range(1, update + 1)) - set(found))
            what = f"lacks the {kind} of {len(lost)} updates, the first of them {lost[0]}" if lost else f"has {kind} of updates twice, or out of order"
            raise ValueError(f"{log} {what}, and the run is at update {update}: remove from {log.with_name('checkpoint')} those of "
                             f"{'that update and later' if lost else 'all updates'}; --resume then makes these updates again, from an earlier checkpoint or from the beginning")


def _progress(row, trainer, left, rows) -> None:
    if trainer.ranks.number != 0:
        return
    evaluations = [r for r in rows if r["kind"] == "evaluation"]
    kl = f"KL {row['predicted_kl']:.1e} → {row['realised_kl']:.1e}  α {row['alpha']:.2f}  " if "alpha" in row else ""
    print(f"update {row['update']}/{trainer.config.updates}  reward {row['reward']:.3f}  {kl}length {row['length']:.1f}  "
          f"{row['tokens'] / sum(trainer.seconds.values()):.0f} tokens/s  Pass@1 {evaluations[-1]['pass_at_1']:.3f}  {left:.0f} s left", flush=True)


def _environment(config: RunConfig, folder: Path, ranks: int, task) -> dict:
    found = {"model_sha256": base_sha256(config.model), "python": platform.python_version(), "torch": torch.__version__, "logra": logra.__version__,
             "machine": platform.machine(), "command": f"python -m logra.rl.train {folder.name}/config.json",
             "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    if ranks > 1:
        found["ranks"] = ranks
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    if hasattr(task, "sha256"):
        found["data_sha256"] = task.sha256()                # of what a task that reads files was trained and evaluated on
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m logra.rl.train", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a YAML or JSON file with the fields of RunConfig")
    parser.add_argument("--folder", type=Path, help="the record's folder (default: records/NAME-HASH)")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    parser.add_argument("--wall-clock", type=stopping.seconds, metavar="D-HH:MM:SS", help="stop before this much time has passed, with a checkpoint and exit code 75")
    parser.add_argument("--no-logs", action="store_true", help="nothing for TensorBoard and W&B")
    options = parser.parse_args(arguments)
    config = RunConfig(**(yaml.safe_load(options.config.read_text()) or {}))
    folder = options.folder or records_root() / config.record
    limit = Limit(options.wall_clock).listen()
    ours = launched()
    try:
        made = run(config, folder, options.resume, limit, shown=not options.no_logs)
        if not ours or dist.get_rank() == 0:
            print(made)
    except KeyboardInterrupt:
        return 130
    except Stopped as stopped:
        if not ours or dist.get_rank() == 0:
            print(f"{stopped}; --resume goes on from there", file=sys.stderr)
        return stopped.code
    finally:
        if ours:
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

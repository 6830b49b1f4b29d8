"""The training loop: one for every family, on one process or many.

A step reads the features of its samples, counts the supervised rows of every process, runs each packed row
forward and backward, sums the gradients, clips and updates. Losses are divided by the global counts before
any backward, so sums over rows and processes are the loss and the gradient of the step; nothing is averaged.
All counters are optimizer steps. A run that was killed goes on from its newest checkpoint, bit for bit. Knows
no family and no decoding. Legend: K slots.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    broadcast,
    broadcast_object_list,
    gather_object,
)
from torch import nn
from tqdm import tqdm

from spectrain import checkpoint
from spectrain.artifacts import fingerprint
from spectrain.batches import deal, open_source, plan_steps, read_steps, step_seed
from spectrain.capture import check_rejected
from spectrain.checks import CheckFailed
from spectrain.config import RunConfig
from spectrain.features import FeatureBatch, FeatureStore
from spectrain.joint import Joint, answer_rows
from spectrain.kernels.products import bfloat16_products
from spectrain.objectives import Objective, RowIndex, num_slots
from spectrain.optim import build_optimizer, learning_rate, set_learning_rate, trainable
from spectrain.record import Record
from spectrain.target import Target

STATS = ("loss", "alpha", "agree", "count")
MAX_OVERFLOWS = 3  # steps in a row with an infinite gradient; one is an accident, three are a diverged run

log = logging.getLogger(__name__)

Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class TrainResult:
    """step: optimizer steps done; tau: the best evaluated one, or None.

    counters: samples read, trained, skipped (no supervised row, or a skipped step) and rejected (non-finite
    states), once per pass that reads them; steps skipped as empty or for an infinite gradient; tokens.
    norms_unchanged of norms_total: entries of vectors (norm weights) that still equal their initial value.
    """

    step: int
    counters: dict[str, int]
    tau: float | None
    norms_unchanged: int
    norms_total: int


def train(
    config: RunConfig,
    target: Target,
    prepared: Any,
    store: FeatureStore | None,
    drafter: Any,
    folder: Path,
    evaluate: Evaluate | None = None,
) -> TrainResult:
    """Train `drafter` in place on `prepared.train` and write checkpoints and metrics.jsonl to `folder`.

    store: the captured features, or None with train.features=online. evaluate: called on the main process
    with the drafter in eval mode; returns numbers by name, "tau" among them. Raises ValueError for settings,
    features or checkpoints of another run, CheckFailed naming the samples when a loss is not finite.
    """
    accelerator = make_accelerator(config, target)
    source = open_source(config.train, target, prepared.train, store, drafter.taps)
    loop = _Loop(config, target, source, drafter, folder, evaluate, accelerator)
    try:
        loop.resume()
        loop.run()
        return loop.result()
    finally:
        if loop.joint is not None:
            loop.joint.close()


def make_accelerator(config: RunConfig, target: Target) -> Accelerator:
    """The processes and the device of this run; raises ValueError if the launcher asks for what the loop does
    not do."""
    accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision="no")
    if accelerator.distributed_type in (
        DistributedType.DEEPSPEED,
        DistributedType.FSDP,
        DistributedType.MEGATRON_LM,
    ):
        raise ValueError(
            f"accelerate launch asks for {accelerator.distributed_type.value}: every process trains a whole "
            "copy of the drafter; launch without it (--multi_gpu)"
        )
    ours, theirs = accelerator.device, target.device
    if ours.type != theirs.type or (ours.index or 0) != (theirs.index or 0):
        raise ValueError(
            f"device={config.device!r}: this process trains on {ours}, but the target is on {theirs}"
        )
    return accelerator


class _Loop:
    def __init__(self, config, target, source, drafter, folder, evaluate, accelerator: Accelerator):
        self.config, self.source = config, source
        self.drafter, self.folder, self.evaluate = drafter.train(), folder, evaluate
        self.accelerator = accelerator
        self.plan = plan_steps(source.lengths, config.train)
        self.target_print = target.fingerprint()
        self.optimizer = build_optimizer(drafter, config.train)
        self.joint: Joint | None = None
        if config.joint.rank:
            self.joint = Joint(config, target, drafter, steps=len(self.plan))
            self.optimizer = self.joint.optimizer(self.optimizer, config)
        self.parameters = trainable(drafter)
        self.norms = {name: p.detach().clone() for name, p in self.parameters.items() if p.ndim == 1}
        self.objective = Objective(config.objective, drafter, target)
        self.slots = num_slots(drafter)
        samples = fingerprint([source.content, source.ids])
        self.settings = checkpoint.settings(config, self.target_print, samples)
        self.step, self.overflows = 0, 0
        self.tau: float | None = None
        self.counters = dict.fromkeys(
            ("samples_read", "samples_trained", "samples_skipped", "samples_rejected", "tokens"), 0
        ) | {"steps_empty": 0, "steps_overflowed": 0}

    def resume(self) -> None:
        """Go on from the newest checkpoint, which must be of the same settings, or begin."""
        found = [checkpoint.latest(self.folder) if self.accelerator.is_main_process else None]
        folder = broadcast_object_list(found)[0]
        if folder is None:
            return self._begin()
        state = checkpoint.restore(folder, self.drafter, self.optimizer)
        checkpoint.check_settings(folder, state["settings"], self.settings, self.config)
        self.step, self.tau, self.counters = state["step"], state["best_tau"], state["counters"]
        self.overflows = state["overflows_in_row"]
        log.info("resumed from %s: step %d of %d", folder, self.step, len(self.plan))

    def _begin(self) -> None:
        """Start alike on every process; a drafter that wants states of the target has those of the first
        pass."""
        if hasattr(self.drafter, "start_from"):
            steps = (step.samples for step in self.plan if step.pass_number == 0)
            micro, device = self.config.train.micro_tokens, self.accelerator.device
            rows = (row for samples in steps for row in deal(samples, self.source.lengths, micro, 1)[0])
            batches = (self.source.read(row)[0] for row in rows)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.config.train.seed)
                self.drafter.start_from(batch.to(device) for batch in batches if batch is not None)
        for parameter in self.parameters.values():
            broadcast(parameter.data)

    def run(self) -> None:
        if self.step == len(self.plan):
            return
        main, processes = self.accelerator.is_main_process, self.accelerator.num_processes
        record = Record(self.folder, self.config, last_step=self.step) if main else None
        micro, rank = self.config.train.micro_tokens, self.accelerator.process_index
        rows = (deal(s.samples, self.source.lengths, micro, processes)[rank] for s in self.plan[self.step :])
        bar = tqdm(total=len(self.plan), initial=self.step, unit="step", desc="train", disable=not main,
                   mininterval=0.5 if sys.stderr.isatty() else 10)  # fmt: skip
        begin = time.perf_counter()
        try:
            for parts in read_steps(self.source, rows):
                line = self._step(parts, begin)
                scores = self._scores()
                if record is not None:
                    record.write(line | {f"eval/{name}": value for name, value in scores.items()})
                self._save(scores)
                bar.update()
                bar.set_postfix(
                    loss=f"{line['train/loss']:.4f}", tok_s=f"{line['train/throughput_tok_s']:.0f}"
                )
                begin = time.perf_counter()
        finally:
            bar.close()
            if record is not None:
                record.close()

    def _step(self, parts: Sequence[tuple[FeatureBatch | None, list]], begin: float) -> dict[str, Any]:
        """One optimizer step over this process's rows, whose reading began at `begin`; returns its line of
        metrics."""
        planned = self.plan[self.step]
        torch.manual_seed(step_seed(self.config.train.seed, self.step, self.accelerator.process_index))
        batches = [batch.to(self.accelerator.device) for batch, _ in parts if batch is not None]
        indices = [self.drafter.index(batch.tokens) for batch in batches]
        counts, tally = self._count(batches, indices, [bad for _, rejected in parts for bad in rejected])
        rate = learning_rate(self.step, len(self.plan), self.config.train)
        norm, shift, stats = 0.0, 0.0, torch.zeros(len(STATS), self.slots, dtype=torch.float64)
        empty = not bool(counts.sum())
        if not empty:
            stats, shift = self._backward(batches, indices, counts, tally["answer_tokens"])
            norm = self._update(rate, [i for batch in batches for i in batch.tokens.sample_ids])
        self.step += 1
        skipped = empty or norm == float("inf")
        self._tally(tally, len(planned.samples), empty, skipped)
        seconds = time.perf_counter() - begin
        loss, alpha, agree, count = stats.tolist()
        return {
            "step": self.step,
            "pass": planned.pass_number,
            "train/loss": sum(loss),
            "train/alpha": [a / n if n else None for a, n in zip(alpha, count, strict=True)],
            "train/agreement": [a / n if n else None for a, n in zip(agree, count, strict=True)],
            "train/rows": [int(n) for n in count],
            "train/learning_rate": rate,
            **({} if self.joint is None else {"train/target_kl": shift}),
            "train/grad_norm": norm if norm != float("inf") else None,
            "train/skipped": int(skipped),
            "train/tokens": tally["tokens"],
            "train/time_s": seconds,
            "train/throughput_tok_s": tally["tokens"] / seconds,
        }

    def _count(
        self, batches: Sequence[FeatureBatch], indices: Sequence[RowIndex], rejected: list[list[str]]
    ) -> tuple[torch.Tensor, dict[str, int]]:
        """Rows per (term, slot) and counts of samples and tokens, both over all processes."""
        device = self.accelerator.device
        counts = torch.zeros(len(self.config.objective.terms), self.slots, dtype=torch.float64, device=device)
        tally = {"tokens": 0, "supervised": 0, "rejected": len(rejected), "answer_tokens": 0}
        for batch, index in zip(batches, indices, strict=True):
            counts += self.objective.count(index, batch)
            tally["tokens"] += len(batch.tokens)
            tally["supervised"] += len(batch.tokens.document_ids[index.row].unique())
            tally["answer_tokens"] += len(answer_rows(batch.tokens))
        own = torch.tensor(list(tally.values()), dtype=torch.float64, device=device)
        summed = self.accelerator.reduce(torch.cat((counts.flatten(), own)), "sum")
        counts, own = summed[: counts.numel()].view_as(counts), summed[counts.numel() :]
        tally = {name: int(value) for name, value in zip(tally, own, strict=True)}
        if tally["rejected"]:
            everyone = gather_object(rejected)
            log.warning("samples with non-finite target states left out: %s", everyone)
            self.counters["samples_rejected"] += len(everyone)
            seen = max(self.counters["samples_read"], len(self.source.ids))
            check_rejected(
                everyone, self.counters["samples_rejected"], seen, self.config.train.max_bad_fraction
            )
        return counts, tally

    def _backward(
        self,
        batches: Sequence[FeatureBatch],
        indices: Sequence[RowIndex],
        counts: torch.Tensor,
        answer_tokens: int,
    ) -> tuple[torch.Tensor, float]:
        """Gradients of this process's rows into the parameters; returns statistics [4, K] over all processes,
        and the mean KL(original || tuned) of joint training, else 0.

        Raises ValueError on every process, naming the samples of rows whose loss is not finite.
        """
        self.optimizer.zero_grad()
        device = self.accelerator.device
        stats = torch.zeros(len(STATS), self.slots, dtype=torch.float64, device=device)
        bad: list[str] = []
        joint = self.joint if self.joint is not None and self.joint.moves_target(self.step) else None
        shift = 0.0
        half = self.config.train.dtype == "bfloat16"
        with bfloat16_products(half and device.type == "cpu"):
            for batch, index in zip(batches, indices, strict=True):
                if not len(index.row) and joint is None:
                    continue
                with torch.autocast(device.type, torch.bfloat16, enabled=half and device.type != "cpu"):
                    seen = batch if joint is None else joint.states(batch)
                    rows = self.drafter.rows(seen)
                    result = self.objective.loss(rows, batch, self.drafter.head_weight(), counts)
                    loss = result.loss
                    if joint is not None:
                        moved = joint.shift.loss(seen, batch, answer_tokens)
                        loss, shift = loss + moved.loss, shift + float(moved.stats["loss"].sum())
                loss.backward()
                stats += torch.stack([result.stats[name].to(device) for name in STATS])
                if not bool(loss.isfinite()):
                    bad += batch.tokens.sample_ids
        rest = torch.tensor([shift, float(len(bad))], dtype=torch.float64, device=device)
        *summed, shift, failed = self.accelerator.reduce(torch.cat((stats.flatten(), rest)), "sum").tolist()
        if failed:
            names = ", ".join(gather_object(bad))
            raise CheckFailed(f"step {self.step + 1}: the loss is not finite on a row of the samples {names}")
        return stats.new_tensor(summed).view_as(stats), shift / self.config.joint.weight

    def _update(self, rate: float, sample_ids: list[str]) -> float:
        """Sum gradients over processes, clip, update; returns the norm before clipping, inf if the update was
        skipped.

        Parameters are not wrapped for data-parallel training: its averaging hooks need the same number of
        backwards on each process, but rows are uneven and a process may have none. One sum per tensor and
        step moves the same bytes.
        """
        moved = list(self.parameters.values())
        if self.joint is not None:
            moved = self.joint.moved(self.parameters, self.step)
        for parameter in moved:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self.accelerator.num_processes > 1:
                parameter.grad = self.accelerator.reduce(parameter.grad, "sum")
        norm = float(self.accelerator.clip_grad_norm_(moved, self.config.train.clip))
        if norm == norm and norm != float("inf"):
            set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
            self.overflows = 0
            return norm
        names = ", ".join(gather_object(sample_ids))
        self.overflows += 1
        if norm != norm or self.overflows >= MAX_OVERFLOWS:
            raise CheckFailed(
                f"step {self.step + 1}: the gradient is {norm} ({self.overflows} in a row); samples {names}"
            )
        log.warning("step %d skipped: the gradient is infinite; samples %s", self.step + 1, names)
        return norm

    def _tally(self, tally: Mapping[str, int], read: int, empty: bool, skipped: bool) -> None:
        self.counters["samples_read"] += read
        trained = 0 if skipped else tally["supervised"]
        self.counters["samples_trained"] += trained
        self.counters["samples_skipped"] += read - tally["rejected"] - trained
        self.counters["tokens"] += tally["tokens"]
        self.counters["steps_empty"] += int(empty)
        self.counters["steps_overflowed"] += int(skipped and not empty)

    def _scores(self) -> dict[str, float]:
        """What `evaluate` says if it is due at this step, on every process; the drafter's mode is put back
        whatever happens."""
        every = self.config.train.eval_every
        last = self.step == len(self.plan)
        if self.evaluate is None or not (last or every and self.step % every == 0):
            return {}
        scores: list[Any] = [None]
        training = self.drafter.training
        if self.accelerator.is_main_process:
            self.drafter.eval()
            try:
                tuned = nullcontext() if self.joint is None else self.joint.tuned()
                with torch.no_grad(), tuned:
                    scores = [dict(self.evaluate(self.drafter))]
            finally:
                self.drafter.train(training)
        return broadcast_object_list(scores)[0]

    def _save(self, scores: Mapping[str, float]) -> None:
        tau = scores.get("tau")
        improved = tau is not None and (self.tau is None or tau >= self.tau)
        if improved:
            self.tau = tau
        due = self.step % self.config.train.save_every == 0 or self.step == len(self.plan)
        if (improved or due) and self.accelerator.is_main_process:
            planned = self.plan[self.step - 1]
            state = {
                "step": self.step,
                "total": len(self.plan),
                "cursor": {"pass": planned.pass_number, "step_of_pass": planned.number + 1},
                "random": {"seed": self.config.train.seed, "next_step": self.step},
                "tau": tau,
                "best_tau": self.tau,
                "counters": self.counters,
                "overflows_in_row": self.overflows,
                "settings": self.settings,
            }
            checkpoint.save(
                self.folder,
                self.drafter,
                self.optimizer,
                state,
                target=self.target_print,
                keep=self.config.train.keep,
            )
        self.accelerator.wait_for_everyone()

    def result(self) -> TrainResult:
        unchanged = sum(int((self.parameters[name] == initial).sum()) for name, initial in self.norms.items())
        total = sum(initial.numel() for initial in self.norms.values())
        counters = self.counters
        if self.accelerator.is_main_process:
            log.info(
                "trained %d steps: %s",
                self.step,
                ", ".join(f"{name} {value}" for name, value in counters.items()),
            )
            log.info("norm entries that still equal their initial value: %d of %d", unchanged, total)
        return TrainResult(self.step, dict(counters), self.tau, unchanged, total)

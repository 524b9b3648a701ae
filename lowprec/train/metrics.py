"""Buffers the numbers of each step on the device and writes them to the record at a flush."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from lowprec.config.schema import is_sampled
from lowprec.data.loader import Batch
from lowprec.diagnostics.blocks import BLOCK_STATISTICS
from lowprec.diagnostics.buffer import StepBuffer
from lowprec.diagnostics.spikes import Collapse, Detector, Spike, protocol_of, spike_events
from lowprec.optim.paging import host_bytes
from lowprec.optim.stable_adamw import STATISTICS
from lowprec.runs.read import scan_metrics, scan_rows
from lowprec.runs.record import Record, RecordError
from lowprec.runs.tables import missing_steps, read_tensors
from lowprec.train.build import Built
from lowprec.train.loggers import Logger

PROBED_SAMPLES = 32  # samples of a step on which blocks are measured
DETECTED_ROWS = 1000  # at a time: the detector works in float64
SKIPS_TOLERATED = 10  # unreadable samples that are always allowed


@dataclass
class Ended:
    """How an attempt ended: a state of status.json, its step and the reason.

    `stop_requested`: whether a signal asked for a stop, perhaps only during the last step.
    """

    state: str
    step: int
    reason: str = ""
    stop_requested: bool = False


def is_due(step: int, interval: int) -> bool:
    """Returns whether something done every `interval` steps is due after this one; 0: never."""
    return interval > 0 and step % interval == 0


class MetricsBuffer:
    """Holds the numbers of the steps since the last flush and writes them to the record.

    At a flush the host reads the results: it applies the non-finite rule, writes the rows that
    belong to the run and returns how the run ended, if it did. Every rank has a buffer, but
    only rank 0 writes the record. `on_flush` is called with the last row and its timing.
    """

    def __init__(
        self, built: Built, record: Record, logger: Logger, on_flush: Callable[[dict], None]
    ):
        config = built.config
        self.config, self.record, self.world = config, record, built.world
        self.state, self.probe = built.state, built.task.probe
        self.logger, self.on_flush = logger, on_flush
        self.device = built.device
        self.tensors = built.state.optimizer.names
        diagnostics = config.diagnostics
        others = [name for name in STATISTICS if name not in diagnostics.statistics]
        self.statistics = {"tensors": diagnostics.statistics, "details": others}
        self.intervals = {  # None: not recorded
            "metrics": 1,
            "tensors": diagnostics.every if diagnostics.statistics else None,
            "details": diagnostics.detail_every if others else None,
            "blocks": diagnostics.block_every if self.probe else None,
        }
        self.names = ["loss", "logit_scale", "grad_norm"]
        self.names += ["clipped_grad_norm"] if built.state.optimizer.clip_norm else []
        self.names += ["loss_scale"] if config.scaler.name != "none" else []
        capacity, table = (
            min(config.log_every, config.num_steps),
            (len(self.tensors), len(STATISTICS)),
        )
        self.buffer = StepBuffer(capacity, len(self.names), table, built.device)
        self.lrs: list[float] = []
        self.blocks: list[tuple[int, list[str], Tensor]] = []
        self.skips: list[dict] = []
        self.num_skips = record.count("skips")
        self.collapse = Collapse(config.batch_size, config.warmup_steps, config.num_steps)
        self.detector: Detector | None = None
        self._restore_detector()
        self.spikes: list[tuple[int, str]] = []  # step and kind of the last flush's
        self.waited = 0.0
        self.start = self.flushed = time.perf_counter()

    def require_record(self, last: int) -> None:
        """Raises RecordError, in all ranks, if the record lacks a step up to `last`."""

        def check() -> None:
            if faults := missing_steps(self.record.run, last, self.intervals):
                advice = "restore the damaged files from a copy, or delete the run directory"
                raise RecordError(f"{'; '.join(faults)}: {advice}")

        self.world.first(check)

    @property
    def is_full(self) -> bool:
        """True when the next step needs a flush first."""
        return self.buffer.is_full

    def wait_for(self, batches: Iterator[Batch]) -> Batch:
        """Returns the next batch and measures the time spent waiting for it."""
        before = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - before
        self.skips += batch.skips
        return batch

    def append(self, step: int, values: dict[str, Tensor | float]) -> None:
        """Adds a step's 0-d values ("lr" on the host) and the optimizer's statistics."""
        scalars = [torch.as_tensor(values[name], device=self.device) for name in self.names]
        self.buffer.append(step, scalars, self.state.optimizer.statistics)
        self.lrs.append(values["lr"])

    def _fetch(self) -> tuple[list[dict], np.ndarray]:
        """Empties the buffer; returns a row per step and [steps, tensors, statistics]."""
        steps, scalars, tables = self.buffer.fetch()
        rows = [
            {"step": step, "lr": lr, **dict(zip(self.names, map(float, values), strict=True))}
            for step, lr, values in zip(steps, self.lrs, scalars, strict=True)
        ]
        self.lrs = []
        return rows, tables

    def append_blocks(self, step: int, batch: Batch) -> None:
        """Measures the model's blocks on some of the step's samples, at sampled steps."""
        if not is_sampled(step, self.intervals["blocks"]):
            return
        count = PROBED_SAMPLES
        part = Batch(batch.images[:count], batch.tokens[:count], batch.labels, batch.samples)
        part = part.to(self.device)
        part.images = self.world.all_gather(part.images)[:count]
        part.tokens = self.world.all_gather(part.tokens)[:count]
        self.blocks.append((step, self.probe.names, self.probe(part)))

    def flush(self, evaluate: Callable[[], dict] | None = None) -> Ended | None:
        """Writes the buffered steps; returns how the run ended if it diverged or must stop.

        `evaluate()` returns numbers that join the last row, unless the run has diverged.
        """
        rows, tables = self._fetch()
        self.spikes = []
        by_rank = self.world.each(lambda: self.skips)
        self.skips = sorted((s for skips in by_rank for s in skips), key=lambda s: s["position"])
        now = time.perf_counter()
        grad_norms = tables[:, :, STATISTICS.index("grad_norm")]
        scaler = self.config.scaler
        last, diverged, self.state.skips = non_finite_rule(
            rows,
            grad_norms,
            self.tensors,
            scaler=scaler.name,
            max_skips=scaler.max_skips,
            skips=self.state.skips,
        )
        rows, tables = rows[:last], tables[:last]
        if self.config.scaler.name != "none":
            self._count_skipped_tensors(rows, grad_norms)
        try:
            if diverged is None and evaluate is not None:
                rows[-1] |= evaluate()
        finally:
            self._write(rows, tables)
        step = rows[-1]["step"]
        timing = self._timing(step, len(rows), now)
        self.record.append("timing", [timing])
        self.logger.log(rows)
        self.on_flush({**rows[-1], **timing})
        self.waited, self.flushed = 0.0, time.perf_counter()
        if diverged is not None:
            self.record.append("events", [{"step": step, "diverged": diverged}])
            self.spikes.append((step, "divergence"))
            return Ended("diverged", step, diverged)
        return self.world.first(lambda: self._too_many_skips(step))

    def _count_skipped_tensors(self, rows: list[dict], grad_norms: np.ndarray) -> None:
        """Adds the number of tensors with a non-finite gradient; their names are an event."""
        for row, norms in zip(rows, grad_norms, strict=False):
            skipped = [self.tensors[i] for i in np.flatnonzero(~np.isfinite(norms))]
            row["skipped_tensors"] = len(skipped)
            if skipped:
                self.record.append("events", [{"step": row["step"], "skipped": skipped}])

    def _write(self, rows: list[dict], tables: np.ndarray) -> None:
        self.record.append("metrics", rows)
        change = self.config.precision_change.step
        if any(row["step"] == change for row in rows):
            label = self.config.precision_at(change).label
            self.record.append("events", [{"step": change, "precision": label}])
            print(f"precision {label} from step {change} on")
        rms = self._write_tensors("tensors", rows, tables)
        self._write_tensors("details", rows, tables)
        self._write_blocks(rows[-1]["step"])
        if self.detector is not None:
            self._write_spikes(self._detect(rows, rms))
        for row in rows if self.world.is_first else ():
            if text := self.collapse.feed(row["step"], row["loss"]):
                event = {"step": row["step"], self.collapse.verdict: text}
                self.record.append("events", [event])
                print(f"warning: {text}")
        self._write_skips(rows[-1]["step"])

    def _write_tensors(
        self, table: str, rows: list[dict], values: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Appends the statistics of the sampled steps; returns RMS_t by step, if recorded."""
        interval = self.intervals[table]
        sampled = [i for i, row in enumerate(rows) if is_sampled(row["step"], interval)]
        statistics = {
            name: values[sampled, :, STATISTICS.index(name)] for name in self.statistics[table]
        }
        steps = [rows[i]["step"] for i in sampled]
        if sampled:
            self.record.append_tensors(steps, statistics, self.tensors, table)
        return dict(zip(steps, statistics.get("rms", ()), strict=False))

    def _write_blocks(self, last: int) -> None:
        """Appends the measurements of the blocks up to a step and drops the later ones."""
        for step, names, values in self.blocks:
            if step <= last:
                columns = values.cpu().numpy().T[:, None]  # [statistics, 1, blocks]
                statistics = dict(zip(BLOCK_STATISTICS, columns, strict=True))
                self.record.append_tensors([step], statistics, names, "blocks")
        self.blocks = []

    def _write_skips(self, last: int) -> None:
        """Appends the unreadable samples up to a step; warns about entirely lost shards."""
        skips = [s for s in self.skips if s["position"] < last * self.config.batch_size]
        if skips:
            self.record.append("skips", skips)
        for shard, reason in {s["shard"]: s["reason"] for s in skips if not s["key"]}.items():
            print(f"warning: {shard} cannot be read at present: {reason}")
        self.num_skips += len(skips)
        self.skips = []

    def _restore_detector(self) -> None:
        """Builds the spike detector; feeds it and `collapse` the steps of earlier attempts."""
        options = self.config.diagnostics.spikes
        earlier = scan_metrics(self.record.run) if self.world.is_first else []
        for row in earlier:
            self.collapse.feed(row["step"], row["loss"])
        if options.protocol == "none" or not self.world.is_first:
            return
        protocol = protocol_of(warmup_steps=self.config.warmup_steps, **asdict(options))
        self.detector = Detector(protocol, len(self.tensors))
        rms = {}
        for steps, statistics, _ in read_tensors(self.record.run):
            rms |= dict(zip(steps.tolist(), statistics.get("rms", ()), strict=False))
        self._detect(earlier, rms)

    def _detect(self, rows: list[dict], rms: dict[int, np.ndarray]) -> list[Spike]:
        """Returns the spikes that the rows reveal.

        The detector sees RMS_t at recorded steps only, so that a resumed run sees the same.
        """
        spikes = []
        for start in range(0, len(rows), DETECTED_ROWS):
            piece = rows[start : start + DETECTED_ROWS]
            values = np.full((len(piece), len(self.tensors)), np.nan, dtype=np.float32)
            for i, row in enumerate(piece):
                values[i] = rms.get(row["step"], np.nan)
            steps, losses = [row["step"] for row in piece], [row["loss"] for row in piece]
            spikes += self.detector.feed(steps, losses, values)
        return spikes

    def _write_spikes(self, spikes: list[Spike]) -> None:
        """Appends spikes to events.jsonl; prints those of the loss."""
        events = spike_events(spikes, self.tensors)
        for event in events:
            step = event["step"]
            if event["spike"] == "loss":
                print(f"loss spike at step {step}: {event['loss']:.4g}")
                self.spikes.append((step, "loss spike"))
            elif self.config.diagnostics.recorder.rms:
                self.spikes.append((step, f"RMS spike of {next(iter(event['rms']))}"))
        if events:
            self.record.append("events", events)

    def _timing(self, step: int, num_steps: int, now: float) -> dict:
        """Builds a row of timing.jsonl; `data_wait` is an upper bound on the GPU's idle share."""
        seconds, on_gpu = max(now - self.flushed, 1e-9), self.device.type == "cuda"
        is_paged = self.config.optimizer.paged
        return {
            "step": step,
            "attempt": self.record.attempt,
            "wall_s": round(now - self.start, 3),
            "step_ms": round(1000 * seconds / num_steps, 3),
            "images_per_s": round(num_steps * self.config.batch_size / seconds, 1),
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            "data_wait": round(self.waited / seconds, 4),
            **({"paged_gib": host_bytes(self.state.optimizer) / 2**30} if is_paged else {}),
        }

    def _too_many_skips(self, step: int) -> Ended | None:
        num_read = step * self.config.batch_size + self.num_skips
        rate = self.config.data.max_skip_rate
        if self.num_skips <= max(SKIPS_TOLERATED, rate * num_read):
            return None
        skips = scan_rows(self.record.run / "skips.jsonl")[0]
        num_bad = len({(skip.get("shard"), skip.get("key")) for skip in skips})
        if num_bad <= SKIPS_TOLERATED:  # each of them was read in every pass
            return None
        shards = Counter(skip.get("shard") for skip in skips).most_common(3)
        worst = ", ".join(f"{shard} ({count})" for shard, count in shards)
        reason = (
            f"{num_bad} samples could not be read, {self.num_skips} of {num_read} times, more than "
            f"data.max_skip_rate={rate:g}; the worst shards: {worst}; the last reason: "
            f"{skips[-1]['reason']} (skips.jsonl lists all)"
        )
        return Ended("failed", step, reason)


def non_finite_rule(
    rows: list[dict],
    grad_norms: np.ndarray,
    names: list[str],
    *,
    scaler: str,
    max_skips: int,
    skips: int,
) -> tuple[int, str | None, int]:
    """Applies the non-finite rule: finds the step at which a run diverged, if it did.

    A non-finite loss diverges. Without loss scaling, so does a non-finite gradient; with it the
    step (dynamic) or the tensor (fixed) was skipped, and `max_skips` consecutive skips diverge.

    `rows`: one per step, with `step` and `loss`; `grad_norms`: [steps, tensors] of the named
    tensors; `scaler`: "none", "dynamic" or "fixed"; `skips`: consecutive skips before the first
    row. Returns the number of rows that belong to the run, why it diverged (or None), and the
    consecutive skips.
    """
    for i, row in enumerate(rows):
        if not np.isfinite(row["loss"]):
            return i + 1, f"the loss is {row['loss']} at step {row['step']}", skips
        bad = np.flatnonzero(~np.isfinite(grad_norms[i]))
        skips = skips + 1 if len(bad) else 0
        if len(bad) and (scaler == "none" or skips >= max_skips):
            first = ", ".join(names[j] for j in bad[:5]) + (", ..." if len(bad) > 5 else "")
            what = f"{len(bad)} gradients are not finite at step {row['step']} ({first})"
            reason = what if scaler == "none" else f"{skips} consecutive skips: {what}"
            return i + 1, reason, skips
    return len(rows), None, skips

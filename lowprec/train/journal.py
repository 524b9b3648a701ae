"""The record's side of the loop: what stays on the device between flushes, and the flush."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from lowprec.config.schema import EIGHT_BIT, OF_SECOND_MOMENT, Config
from lowprec.data.loader import Batch
from lowprec.diagnostics.blocks import BLOCK_STATISTICS
from lowprec.diagnostics.spikes import Detector, protocol_of
from lowprec.optim.stable_adamw import STATISTICS
from lowprec.runs.read import read_tensors, scan_rows
from lowprec.runs.record import Record
from lowprec.train.distributed import ONE_PROCESS, Ranks
from lowprec.train.divergence import judge
from lowprec.train.loggers import Logger
from lowprec.train.speed import Speed
from lowprec.train.state import TrainState
from lowprec.train.step_log import StepLog

PROBED = 32  # samples of a step on which blocks are measured
SKIPS_TOLERATED = 10  # bad samples that no max_skip_rate forbids


@dataclass
class Ended:
    """How a run (or this attempt of it) ended: a state of status.json, its step, the reason."""

    state: str
    step: int
    reason: str = ""


class Journal:
    """Keeps the steps since the last flush on the device; a flush brings them to the record.

    The flush is where the host learns how the run goes: it applies the non-finite rule to what it
    reads, writes the rows that belong to the run, and says how the run ended, if it did. Every
    rank has a journal, with a record that takes nothing except in rank 0, whose verdict is all's.
    """

    def __init__(
        self,
        state: TrainState,
        record: Record,
        config: Config,
        device: torch.device,
        logger: Logger,
        on_flush: Callable[[dict], None] | None,
        world: Ranks = ONE_PROCESS,
        flops: int | None = None,
    ):
        self.world = world
        self.speed = Speed(config.batch_size, world.size, device, flops)
        self.state, self.record, self.config = state, record, config
        self.logger, self.on_flush = logger, on_flush
        self.device = device
        self.tensors = state.optimizer.names
        names = ("loss", "logit_scale", "grad_norm")
        names += ("clipped_grad_norm",) if config.optimizer.clip_norm else ()
        names += ("loss_scale",) if config.scaler.name != "none" else ()
        capacity = min(config.log_every, config.num_steps)
        self.log = StepLog(names, (len(self.tensors), len(STATISTICS)), capacity, device)
        self.blocks: list[tuple[int, list[str], torch.Tensor]] = []
        self.skips: list[dict] = []
        self.num_skips = record.count("skips")
        self.detector = self._detector()
        self.waited = 0.0
        self.start = self.flushed = time.perf_counter()

    @property
    def is_full(self) -> bool:
        """True when the next step needs a flush first."""
        return self.log.is_full

    def wait_for(self, batches: Iterator[Batch]) -> Batch:
        """The next batch; the time spent waiting for it is recorded."""
        before = time.perf_counter()
        batch = next(batches)
        self.waited += time.perf_counter() - before
        self.skips += batch.skips
        return batch

    def append(self, step: int, lr: float, values: dict[str, torch.Tensor]) -> None:
        """Keeps a step's values and the optimizer's statistics, on the device."""
        self.log.append(step, {"lr": lr}, values, self.state.optimizer.statistics)

    def append_blocks(self, step: int, probe: Callable | None, batch: Batch) -> None:
        """Measures the blocks on some of the step's samples, where that is due."""
        every = self.config.diagnostics.block_every
        if probe is None or not _due(step, every):
            return
        some = Batch(batch.images[:PROBED], batch.tokens[:PROBED], batch.labels, batch.samples)
        some = some.to(self.device)
        some.images = self.world.all_gather(some.images)[:PROBED]
        some.tokens = self.world.all_gather(some.tokens)[:PROBED]
        self.blocks.append((step, probe.names, probe(some)))

    def flush(self, evaluate: Callable[[], dict] | None) -> Ended | None:
        """Writes what the device holds; returns how the run ended if it diverged or must stop."""
        rows, tables = self.log.fetch()
        parts = self.world.each(lambda: self.skips)
        self.skips = sorted((s for part in parts for s in part), key=lambda s: s["position"])
        now = time.perf_counter()
        grad_norms = tables[:, :, STATISTICS.index("grad_norm")]
        verdict = judge(
            rows,
            grad_norms,
            self.tensors,
            scaler=self.config.scaler.name,
            max_skips=self.config.scaler.max_skips,
            skips=self.state.skips,
        )
        self.state.skips = verdict.skips
        rows, tables = rows[: verdict.last], tables[: verdict.last]
        if self.config.scaler.name != "none":
            self._note_skipped_tensors(rows, grad_norms)
        try:
            if verdict.reason is None and evaluate is not None:
                rows[-1] |= evaluate()
        finally:
            self._write(rows, tables)
        timing = self._timing(rows[-1]["step"], len(rows), now)
        self.record.append("timing", [timing])
        self.logger.log(rows)
        if self.on_flush:
            self.on_flush({**rows[-1], **timing})
        self.waited, self.flushed = 0.0, time.perf_counter()
        if verdict.reason is not None:
            self.record.append("events", [{"step": rows[-1]["step"], "diverged": verdict.reason}])
            return Ended("diverged", rows[-1]["step"], verdict.reason)
        return self.world.first(lambda: self._too_many_skips(rows[-1]["step"]))

    def _note_skipped_tensors(self, rows: list[dict], grad_norms: np.ndarray) -> None:
        """Counts the tensors whose gradient is not finite in each row; their names are an event."""
        for row, norms in zip(rows, grad_norms, strict=False):
            skipped = [self.tensors[i] for i in np.flatnonzero(~np.isfinite(norms))]
            row["skipped_tensors"] = len(skipped)
            if skipped:
                self.record.append("events", [{"step": row["step"], "skipped": skipped}])

    def _write(self, rows: list[dict], tables: np.ndarray) -> None:
        self.record.append("metrics", rows)
        diagnostics = self.config.diagnostics
        unknown = OF_SECOND_MOMENT if self.config.optimizer.name in EIGHT_BIT else ()
        others = [n for n in STATISTICS if n not in diagnostics.statistics and n not in unknown]
        main = (diagnostics.statistics, diagnostics.every)
        rms = self._write_tensors("tensors", *main, rows, tables)
        self._write_tensors("details", others, diagnostics.detail_every, rows, tables)
        self._write_blocks(rows[-1]["step"])
        if self.detector is not None:
            self._detect(rows, rms)
        end = rows[-1]["step"] * self.config.batch_size
        skips = [skip for skip in self.skips if skip["position"] < end]
        if skips:
            self.record.append("skips", skips)
        for shard, reason in {s["shard"]: s["reason"] for s in skips if not s["key"]}.items():
            print(f"warning: {shard} is lost to this run for now: {reason}")
        self.num_skips += len(skips)
        self.skips = []

    def _write_tensors(
        self, table: str, names: list[str], every: int | None, rows: list[dict], values: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Appends the statistics of the steps that are due; RMS_t of each, if it is among them."""
        due = [i for i, row in enumerate(rows) if _due(row["step"], every)]
        statistics = {name: values[due, :, STATISTICS.index(name)] for name in names}
        steps = [rows[i]["step"] for i in due]
        if due and statistics:
            self.record.append_tensors(steps, statistics, self.tensors, table)
        return dict(zip(steps, statistics.get("rms", ()), strict=False))

    def _write_blocks(self, last: int) -> None:
        """Appends what was measured of the blocks up to a step."""
        for step, names, values in self.blocks:
            if step <= last:
                columns = values.cpu().numpy().T[:, None]  # [statistics, 1, blocks]
                statistics = dict(zip(BLOCK_STATISTICS, columns, strict=True))
                self.record.append_tensors([step], statistics, names, "blocks")
        self.blocks = []

    def _detector(self) -> Detector | None:
        """The spike detector, which has seen the steps of earlier attempts."""
        chosen = self.config.diagnostics.spikes
        if chosen.protocol == "none" or not self.world.is_first:
            return None
        detector = Detector(protocol_of(**asdict(chosen)), len(self.tensors))
        rms = {}
        for steps, statistics, _ in read_tensors(self.record.run):
            rms |= dict(zip(steps.tolist(), statistics.get("rms", ()), strict=False))
        for row in scan_rows(self.record.run / "metrics.jsonl")[0]:
            detector.feed(row["step"], row["loss"], rms.get(row["step"]))
        return detector

    def _detect(self, rows: list[dict], rms: dict[int, np.ndarray]) -> None:
        """Spikes that the rows make known: lines of events.jsonl, those of the loss on the console.

        `rms`: step: RMS_t of every tensor, where it is recorded; so a resumed run sees the same.
        """
        events = []
        for row in rows:
            found = self.detector.feed(row["step"], row["loss"], rms.get(row["step"]))
            for spike in found:
                if spike.tensor is None:
                    events.append({"step": spike.step, "spike": "loss", "loss": spike.value})
                    print(f"loss spike at step {spike.step}: {spike.value:.4g}")
            of_tensors = {self.tensors[s.tensor]: s.value for s in found if s.tensor is not None}
            if of_tensors:
                events.append({"step": row["step"], "spike": "rms", "rms": of_tensors})
        if events:
            self.record.append("events", events)

    def _timing(self, step: int, num_steps: int, now: float) -> dict:
        """`data_wait`: share of the time that the host waited for data, so the GPU's at most."""
        seconds = max(now - self.flushed, 1e-9)
        return {
            "step": step,
            "attempt": self.record.attempt,
            "wall_s": round(now - self.start, 3),
            "step_ms": round(1000 * seconds / num_steps, 3),
            **self.speed.of(num_steps / seconds),
            "data_wait": round(self.waited / seconds, 4),
        }

    def _too_many_skips(self, step: int) -> Ended | None:
        read = step * self.config.batch_size
        rate = self.config.data.max_skip_rate
        if self.num_skips <= max(SKIPS_TOLERATED, rate * read):
            return None
        skips = scan_rows(self.record.run / "skips.jsonl")[0]
        shards = Counter(skip.get("shard") for skip in skips).most_common(3)
        worst = ", ".join(f"{shard} ({count})" for shard, count in shards)
        return Ended(
            "failed",
            step,
            f"{self.num_skips} of {read} samples could not be read, more than data.max_skip_rate="
            f"{rate:g}; the worst shards: {worst}; the last reason: {skips[-1]['reason']}; "
            "skips.jsonl names them all. Mend them, or raise data.max_skip_rate and go on",
        )


def _due(step: int, every: int | None) -> bool:
    """Whether statistics of a step are recorded: of the first, then of every so many."""
    return every is not None and (step == 1 or step % every == 0)

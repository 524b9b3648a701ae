"""Replays of a run's steps in one process, which share what they can."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from itertools import chain, count, islice
from pathlib import Path

import pandas as pd
import torch
from torch import nn

from analysis.spike_marks import TENSOR
from lowprec.config.schema import Config
from lowprec.data.loader import Batch
from lowprec.data.open import open_data
from lowprec.optim.loss_scaling import NoScaler, build_scaler
from lowprec.optim.stable_adamw import STATISTICS
from lowprec.runs.attempts import step_of
from lowprec.train import build as building
from lowprec.train.checkpoint import save_checkpoint
from lowprec.train.loop import Stepper
from lowprec.train.state import TrainState

NOT_OF_MODEL = ("optimizer", "skip_batches")


class Replayer:
    """Trains from states of a run up to step `last`, again and again.

    Consecutive replays that differ in the optimizer alone share the model, which is compiled once.
    They share batches from step `keep_from` on, which stay in memory (None: no batch does). `step`
    is the last whose batch `skip_batches` leaves out.
    """

    def __init__(self, step: int, last: int, keep_from: int | None = None):
        self.step, self.last, self.keep_from = step, last, keep_from
        self.on_step: Callable[[int], None] = lambda step: None  # called before each step
        self.built: building.Built | None = None  # without a state
        self.settings: dict | None = None
        self.source: Iterator[Batch] | None = None
        self.kept: list[Batch] = []

    def replay(
        self,
        config: Config,
        state: Path,
        *,
        keeps_scaler: bool = True,
        perturbation: int | None = None,
        save_after: Collection[int] = (),
        folder: Path | None = None,
    ) -> pd.DataFrame:
        """Trains from a snapshot or checkpoint to the last step, or until a loss is not finite.

        If `keeps_scaler`, the state's loss scaler continues; otherwise a new one starts.
        `perturbation` is the seed of a relative change of all weights at the precision of their
        dtype. Saves checkpoints of the steps `save_after` in `folder`. Returns the columns step,
        loss and rms: RMS_t of the patch embedding, or NaN if the model has none.
        """
        built = self._build(config)
        optimizer, scaler = built.state.optimizer, built.state.scaler
        built.state.scaler = scaler if keeps_scaler else NoScaler()
        built.state.load(state)
        built.state.scaler = scaler
        if perturbation is not None:
            perturb(built.task.model, perturbation)
        take_step, rows = Stepper(built), []
        first, names = step_of(state) + 1, optimizer.names
        skip_at = max(first, self.step + 1 - config.skip_batches)
        batches = self._batches_from(first)
        earlier = islice(batches, skip_at - first)
        later = islice(batches, min(config.skip_batches, self.step + 1 - skip_at), None)
        for number, batch in zip(range(first, self.last + 1), chain(earlier, later), strict=False):
            self.on_step(number)
            loss = take_step(number, batch)["loss"].item()
            rms = optimizer.statistics[:, STATISTICS.index("rms")].tolist()
            rms = rms[names.index(TENSOR)] if TENSOR in names else math.nan
            rows.append({"step": number, "loss": loss, "rms": rms})
            if number in save_after:
                save_checkpoint(
                    folder, number, built.state, {}, keep=len(save_after), provenance={}
                )
            if take_step.frozen.item():
                break
        return pd.DataFrame(rows)

    def close(self) -> None:
        """Forgets the batches and ends their workers."""
        if self.source is not None:
            self.source.close()
        self.source, self.kept = None, []

    def _build(self, config: Config) -> building.Built:
        """Objects with a new optimizer, and the last replay's model if it is the same."""
        settings = {k: v for k, v in asdict(config).items() if k not in NOT_OF_MODEL}
        settings["lr_scale"] = config.optimizer.lr_scale  # locks parameters
        torch.cuda.empty_cache()  # the last replay's CUDA graph has its own memory
        if settings != self.settings or config.precision_change.step is not None:
            self.close()
            self.built = self.settings = None
            built = building.build(config, open_data(config))
            self.built, self.settings = replace(built, state=None), settings
            return built
        model = self.built.task.model
        scaler = build_scaler(config.scaler.name, config.scaler.init_scale, self.built.device)
        state = TrainState(model, building.build_optimizer(config, model), scaler)
        return replace(self.built, config=config, state=state)

    def _batches_from(self, first: int) -> Iterator[Batch]:
        """Batches of steps first, first + 1, ..., those from `keep_from` on out of memory."""
        if self.keep_from is None or first < self.keep_from:
            yield from self.built.batches_from(first)
            return
        if self.source is None:
            self.source = self.built.batches_from(self.keep_from)
        for place in count(first - self.keep_from):
            self.kept += islice(self.source, max(0, place + 1 - len(self.kept)))
            if place >= len(self.kept):  # the run has no further batch
                return
            yield self.kept[place]


def perturb(model: nn.Module, seed: int) -> None:
    """Multiplies each weight by 1 + eps * n, with its dtype's eps and a standard normal n."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device)
            p.copy_(p.float() * (1 + torch.finfo(p.dtype).eps * noise))

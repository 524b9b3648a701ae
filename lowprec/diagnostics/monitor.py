"""Watches the optimizer of any training loop: RMS_t of every tensor, norms, loss, and spikes."""

import itertools
import json
import logging
import math
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lowprec.config.schema import STATISTICS, is_sampled
from lowprec.diagnostics.buffer import StepBuffer
from lowprec.diagnostics.moments import MomentReader
from lowprec.diagnostics.spikes import PROTOCOLS, Detector, Protocol, Spike, spike_events
from lowprec.nn.linear import KeepsRecipe
from lowprec.nn.recipe import RECIPES
from lowprec.optim.fused import is_capturing
from lowprec.optim.stable_adamw import StableAdamW

WATCHED = STATISTICS[:3]  # rms, grad_norm, update_norm
SCALARS = ("loss", "grad_norm")
HEADER = "# lowprec.diagnostics.watch"  # first line of the config.yaml that `save` writes
NAMES = {"AdamW": "adamw", "StableAdamW": "stable_adamw"}  # as the harness's records name them
logger = logging.getLogger("lowprec")


def watch(
    model: nn.Module,
    optimizer: Optimizer,
    every: int = 1,
    *,
    flush: int = 100,
    step: int = 0,
    protocol: str | Protocol = "paper",
    group: dist.ProcessGroup | None = None,
) -> "Monitor":
    """Records statistics of every tensor after each `optimizer.step()`, and logs spikes.

    RMS_t = sqrt(mean(g^2 / max(u, eps^2))) comes from the optimizer's own second moment u after its
    bias correction, and the gradient g that the optimizer has seen: after clipping by the caller
    and, under a GradScaler, unscaled. `grad_norm` is the norm of this gradient, `update_norm` that
    of lr v / (sqrt(u) + eps), Adam's update without weight decay. StableAdamW's own statistics are
    taken as they are: there, `grad_norm` is before its clipping.

    Nothing is read back to the host within a step: every `flush` steps, one copy fetches all
    numbers. A step that a GradScaler skips is not counted (see `Monitor.drop_losses`), or, by a
    fused optimizer, has RMS_t NaN.
    Rows of FSDP2's shards describe whole tensors, so that all processes must watch; under DDP the
    processes have equal statistics.

    Args:
        model: names the parameters.
        optimizer: StableAdamW, torch.optim.AdamW, Adam without weight decay (foreach, fused and
            capturable, too), or another one whose state has `step`, `exp_avg` and `exp_avg_sq` of
            the gradient, as Adam's; accelerate's and Lightning's wrappers of them, too. Warns of
            other moments, such as those of another library's StableAdamW, debiased already.
        every: steps between records of the tensors; the first step is always recorded.
        flush: steps between copies to the host, and between reports of spikes.
        step: steps taken before, in a resumed run.
        protocol: what counts as a spike, or a name in PROTOCOLS. "paper" ignores the first 1,000
            steps, `Protocol(ignore_steps=100)` the first 100.
        group: processes over which `Monitor.loss` is averaged, such as `dist.group.WORLD`; then all
            of them must watch. None: each process records its own.

    Raises:
        ValueError: an unknown protocol, a number out of bounds, parameters on several devices, an
            optimizer of another model, or one without two betas, such as SGD; at a step, an
            optimizer that has no such state, uses amsgrad, adds weight decay to the gradient, as
            Adam does, or has since got other parameters or another order of them.
    """
    return Monitor(model, optimizer, every, flush, step, protocol, group)


class Monitor:
    """What `watch` returns.

    Attributes:
        names: of the tensors, in the optimizer's order.
        step: number of the last step, counted from 1.
        spikes: all loss and RMS spikes found up to the last flush.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: int,
        flush: int,
        step: int,
        protocol: str | Protocol,
        group: dist.ProcessGroup | None,
    ):
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        self.optimizer, self.every, self.step, self.group = optimizer, every, step, group
        self.model_name, params = type(_inside(model)).__name__, self._params()
        self.recipe = _recipe_of(model)
        named = {p: name.replace("_orig_mod.", "") for name, p in _inside(model).named_parameters()}
        if not any(p in named for p in params):
            raise ValueError("the optimizer has no parameter of the model")
        self._ids = [*map(id, params)]
        self.names = [named.get(p, f"parameter {i}") for i, p in enumerate(params)]
        self.device = params[0].device
        if any(p.device != self.device for p in params):
            raise ValueError("the optimizer's parameters must be on one device")
        for name, value, least in (("every", every, 1), ("flush", flush, 1), ("step", step, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: must be at least {least}")
        if not isinstance(protocol, Protocol) and protocol not in PROTOCOLS:
            allowed = f"a Protocol or one of {', '.join(PROTOCOLS)}"
            raise ValueError(f"protocol={protocol!r}: must be {allowed}")
        self.protocol = protocol if isinstance(protocol, Protocol) else PROTOCOLS[protocol]
        self.spikes: list[Spike] = []
        self._buffer = StepBuffer(flush, len(SCALARS), (len(params), len(WATCHED)), self.device)
        self._detector = Detector(self.protocol, len(params))
        self._rows: list[dict] = []  # what no `save` has written
        self._tables: list[tuple[int, np.ndarray]] = []
        self._unwritten: list[Spike] = []
        self._losses: list[Tensor] = []
        self._lrs: list[Tensor | float] = []
        self._largest_lr = 0.0
        self._has_loss = False  # whether the last step was given one
        self._last_loss = 0.0  # at the last flush
        self._given: dict = {}  # to `save`
        self._folders: dict[Path, Path] = {}  # by what `save` was given
        self._first, self._is_new = step + 1, step == 0 and not optimizer.state
        self._reader = MomentReader(optimizer, self.names, self.device)
        hook = torch.compiler.disable(self._after_step)  # a compiled step calls it as it is
        self._handle = optimizer.register_step_post_hook(hook)

    def loss(self, loss: Tensor | float) -> None:
        """Gives the next step its loss; several calls, as in gradient accumulation, are averaged.

        Pass the loss itself: neither scaled nor divided by the number of micro-batches. Warns if
        the first watched step had none. ValueError for losses of several samples.
        """
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(f"loss {list(loss.shape)}: must be one number, such as its mean")
        if self.step == self._first and not (self._has_loss or self._losses):
            text = "step %d had no loss: call monitor.loss before optimizer.step(); if you call it"
            text += " after the step, each loss is recorded one step late and leads are wrong"
            logger.warning(text, self.step)
        if isinstance(loss, Tensor):
            loss = loss.detach().to(self.device, torch.float32).reshape(())
        else:
            loss = torch.full((), loss, dtype=torch.float32, device=self.device)
        self._losses.append(loss.clone())

    def drop_losses(self) -> None:
        """Drops the losses given since the last step.

        Call it after a step that a GradScaler has skipped without calling the optimizer, which no
        hook sees: `scaler.get_scale()` is lower after `scaler.update()`. Otherwise the next step's
        loss includes them.
        """
        self._losses = []

    @torch.no_grad()
    def read(self) -> None:
        """Records the optimizer's last step.

        A hook calls it after each step, but not in a CUDA graph: call it after each replay.
        """
        if self._buffer.is_full:
            self.flush()
        self.step += 1
        self._has_loss = bool(self._losses)
        norm = torch.full((), math.nan, device=self.device)
        table = norm.expand(len(self.names), len(WATCHED))
        if is_sampled(self.step, self.every):
            norm, table = self._statistics()
        self._buffer.append(self.step, (self._mean_loss(), norm), table)
        lr = self.optimizer.param_groups[0]["lr"]
        self._lrs.append(lr.clone() if isinstance(lr, Tensor) else lr)

    def flush(self) -> None:
        """Fetches the recorded steps, looks for spikes and logs those it finds."""
        steps, scalars, tables = self._buffer.fetch()
        if self._is_new and steps[:1] == [self._first]:
            self._check_first(tables[0, :, WATCHED.index("rms")])
        rms, lrs = tables[:, :, WATCHED.index("rms")], _on_host(self._lrs)
        self._lrs = []
        for step, lr, values, table in zip(steps, lrs, scalars, tables, strict=True):
            row = {"step": step, "lr": lr}
            row |= dict(zip(SCALARS, map(float, values), strict=True))
            self._largest_lr = max(self._largest_lr, row["lr"])
            if is_sampled(step, self.every):
                self._tables.append((step, table.copy()))  # not a view of the steps left out
            else:
                del row["grad_norm"]
            self._rows.append(row)
        if steps:
            self._last_loss = row["loss"] if self._has_loss else 0.0
        spikes = self._detector.feed(steps, scalars[:, 0], rms)
        self.spikes += spikes
        self._unwritten += spikes
        for event in spike_events(spikes, self.names):
            if event["spike"] == "loss":
                logger.warning("loss spike at step %d: %.4g", event["step"], event["loss"])

    def rows(self, since: int = 0) -> list[dict]:
        """A dict for each step after `since` that no `save` has written: what the harness records.

        `step`, `loss` (NaN if none was given), `lr` of the first group and, at recorded steps,
        `grad_norm` over all tensors and `<statistic>/<name>` of each.
        """
        self.flush()
        tables = dict(self._tables)
        keys = [f"{statistic}/{name}" for name in self.names for statistic in WATCHED]
        return [
            row | dict(zip(keys, tables[row["step"]].ravel().tolist(), strict=True))
            if row["step"] in tables
            else dict(row)
            for row in self._rows
            if row["step"] > since
        ]

    def save(self, folder: str | Path, config: dict | None = None) -> None:
        """Adds the steps since the last call to a run directory, which `analysis` reads.

        Call it at checkpoints and at the end, in one process; until then, a step takes 12 bytes
        per tensor on the host. The run is "finished", or "diverged" if the last step's loss is not
        finite. If the folder has another run, this one is saved beside it, as `<folder>-2`, with a
        warning. A resumed run, watched with its `step`, may write into its folder again: of a step
        that is there twice, the later row counts. `config` has keys of `lowprec.config.schema`,
        dotted or nested, that tell runs apart, such as {"seed": 1, "optimizer.beta2": 0.999}, and
        the monitor remembers them; the recipe is that of the layers watched. After any error but
        ConfigError, the rows remain, and another folder can take them.

        Raises:
            ConfigError: a key that the schema does not have, or a value of another type; the run
                is saved without it.
            RunBusyError: another process writes there.
            RunError: a resumed run, where `<folder>-2`, ... or `<folder>-99` exists.
            ImportError: pyarrow or pyyaml is missing.
        """
        try:
            from lowprec.config.check import ConfigError, RunError, settings
            from lowprec.runs import durable
            from lowprec.runs.record import Record
        except ImportError as error:
            raise ImportError(
                "save needs pyarrow and pyyaml: pip install pyarrow pyyaml"
            ) from error
        asked = Path(folder).resolve()
        is_resumed_here = self._first > 1 and asked not in self._folders
        if is_resumed_here and (beside := _folders_beside(asked)):
            folders = ", ".join(map(str, [asked, *beside] if asked.exists() else beside))
            text = f"a resumed run may be in {folders}: name the folder of this run"
            raise RunError(f"{text}; if it is {asked}, rename the others first")
        folder = self._folders.get(asked, asked)
        earlier, has_rows = _config_of(folder), (folder / "metrics.jsonl").exists()
        is_foreign = earlier == {} or (has_rows and earlier is None)
        continues = self._first > 1 or asked in self._folders
        if is_foreign or (has_rows and not continues):
            earlier, folder = None, _free_folder_beside(folder)
            text = "%s has another run: this one is saved in %s; if resumed, save it there, too"
            logger.warning(text, asked, folder)
        self.flush()
        if earlier:  # a resumed run sees only the end of a schedule
            self._largest_lr = max(self._largest_lr, earlier.get("optimizer.lr", 0.0))
        known, faults = settings(config or {})
        given = self._given | known
        config = self._config(folder.name) | given
        if not self._folders:
            self._check_losses()
        with closing(Record(folder)) as record:
            text = f"{HEADER}\n{json.dumps(config, indent=2)}"  # JSON is YAML, too
            durable.replace(record.run / "config.yaml", text.encode())
            self._given, self._folders[asked] = given, folder
            self._write(record)
        self._rows, self._tables, self._unwritten = [], [], []
        if faults:
            raise ConfigError([*faults, f"{folder} is saved without these keys"])

    def _check_losses(self) -> None:
        """Warns of a run that is too short for loss spikes or has no loss."""
        first = max(self.protocol.ignore_steps, -(-self.protocol.window // 2))  # a loss needs half
        if self.step <= first:
            text = "%d steps are saved, and the first %d cannot have loss spikes: for short runs,"
            text += " pass watch protocol=Protocol(ignore_steps=..., window=...)"
            logger.warning(text, self.step, first)
        has_none = self._rows and all(math.isnan(row["loss"]) for row in self._rows)
        if has_none and not self._has_loss:
            logger.warning("no loss is saved: call monitor.loss(loss) before each optimizer.step()")

    def _write(self, record: "Record") -> None:  # noqa: F821 (imported by `save` alone)
        """Appends what was not saved yet, and sets the status."""
        record.append("metrics", self._rows)
        record.append("events", spike_events(self._unwritten, self.names))
        if self._tables:
            steps, values = zip(*self._tables, strict=True)
            statistics = dict(zip(WATCHED, np.stack(values).transpose(2, 0, 1), strict=True))
            record.append_tensors(steps, statistics, self.names)
        if math.isfinite(loss := self._last_loss):
            record.status("finished", self.step)
        else:  # as in the harness
            record.status("diverged", self.step, f"the loss is {loss} at step {self.step}")

    def close(self) -> None:
        """Stops watching; what was recorded remains."""
        self._handle.remove()

    def _after_step(self, *_: object) -> None:
        if not is_capturing(self.device):
            self.read()

    def _check_first(self, rms: np.ndarray) -> None:
        """Warns of an optimizer whose first second moment, after Adam's correction, is not g^2."""
        largest = np.nanmax(rms, initial=0.0)
        if largest > 2 or 0 < largest < 0.5:
            text = "RMS_t of the first update is at most %.3g, not 1: unless most gradients are "
            text += "zero or below eps, %s does not keep Adam's moments, and RMS_t and norms of "
            text += "updates are wrong"
            logger.warning(text, largest, type(self.optimizer).__name__)

    def _params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _mean_loss(self) -> Tensor:
        """NaN if no process has given a loss since the last step."""
        losses, self._losses = self._losses, []
        count = torch.full((), len(losses), dtype=torch.float32, device=self.device)
        total = torch.stack([torch.stack(losses).sum() if losses else count, count])
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return total[0] / total[1]

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """The global gradient norm, 0-d, and [tensors, WATCHED]."""
        optimizer, params = self.optimizer, self._params()
        if [*map(id, params)] != self._ids:
            fault = "the optimizer has other parameters, or another order of them, than before"
            raise ValueError(f"{fault}: close() and watch again")
        if isinstance(optimizer, StableAdamW):
            return optimizer.grad_norm, optimizer.statistics[:, : len(WATCHED)]
        return self._reader.read(params)

    def _config(self, name: str) -> dict:
        """What is known of the run, by keys of `lowprec.config.schema`."""
        group = self.optimizer.param_groups[0]
        kind = type(self.optimizer).__name__
        thresholds = asdict(self.protocol)
        del thresholds["max_lead"]
        config = {
            **{"name": name, "experiment": None, "scale": "mini", "num_steps": max(self.step, 1)},
            **{"log_every": self._buffer.capacity, "model.name": self.model_name},
            **{"precision.autocast": "unknown", "precision.recipe": self.recipe},
            "optimizer.name": NAMES.get(kind, kind.lower()),
            "optimizer.weight_decay": float(group.get("weight_decay", 0.0)),
            "diagnostics.statistics": list(WATCHED),
            "diagnostics.every": self.every,
            "data.name": "unknown",
        }
        config |= {f"optimizer.beta{i}": float(beta) for i, beta in enumerate(group["betas"], 1)}
        positive = {"optimizer.lr": self._largest_lr, "optimizer.eps": float(group.get("eps", 0.0))}
        config |= {key: value for key, value in positive.items() if value}
        return config | {f"diagnostics.spikes.{key}": value for key, value in thresholds.items()}


def _recipe_of(model: nn.Module) -> str:
    """The recipe of a model's low-precision layers; "custom" for several or a caller's own."""
    layers = (module for module in model.modules() if isinstance(module, KeepsRecipe))
    names = {layer.recipe_name() for layer in layers} - {"high"}
    if not names:
        return "high"
    return names.pop() if len(names) == 1 and names <= RECIPES.keys() else "custom"


def _inside(model: nn.Module) -> nn.Module:
    """The model inside of DDP and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod
        else:
            return model


def _on_host(numbers: list[Tensor | float]) -> list[float]:
    """One copy for all numbers that are tensors."""
    tensors = [x.reshape(()) for x in numbers if isinstance(x, Tensor)]
    fetched = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(fetched) if isinstance(x, Tensor) else float(x) for x in numbers]


def _folders_beside(folder: Path) -> list[Path]:
    """The existing folders to which an earlier `save` may have moved a run: `<folder>-2`, ..."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in range(2, 100))
    return [path for path in names if path.exists()]


def _free_folder_beside(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in names if not path.exists())


def _config_of(folder: Path) -> dict | None:
    """The config that `save` has written there: {} if it is another's, None if there is none."""
    path = folder / "config.yaml"
    if not path.exists():
        return None
    header, _, text = path.read_text(errors="replace").partition("\n")
    return json.loads(text) if header == HEADER else {}

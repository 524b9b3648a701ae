"""Dashboards, which copy the record. Training continues when one fails, hangs or is slow."""

import queue
import threading
from pathlib import Path

START_S = 60  # training waits: data workers should not be forked while the dashboard is imported
PENDING = 100_000  # rows that wait for a slow dashboard
END_S = 60  # time to send pending rows when the run has ended


class TensorBoard:
    """TensorBoard event files under `<run>/tensorboard`."""

    def __init__(self, run: Path, config: dict):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(run / "tensorboard")
        self.close = self._writer.close

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes one scalar per number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class Wandb:
    """Weights & Biases; WANDB_MODE=offline keeps it under `<run>/wandb`."""

    def __init__(self, run: Path, config: dict):
        import wandb

        settings = wandb.Settings(x_disable_meta=True)  # a typed URL may hold a password
        names = {"project": "lowprec", "name": run.name, "id": run.name, "dir": run}
        self._run = wandb.init(**names, resume="allow", config=config, settings=settings)
        self.close = self._run.finish

    def log(self, step: int, values: dict[str, float]) -> None:
        """Writes one history row."""
        self._run.log(values, step=step)


class Trackio(Wandb):
    """Trackio, whose calls are those of wandb, in TRACKIO_DIR; `trackio show` displays it.

    Steps that a resumed run repeats appear twice.
    """

    def __init__(self, run: Path, config: dict):
        import trackio

        self._run = trackio.init("lowprec", run.name, resume="allow", config=config)
        self.close = self._run.finish


DASHBOARDS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


class Logger:
    """Feeds the dashboard that `logger.name` names ("none": no dashboard), from a daemon thread.

    The dashboard is dropped, with one message, when it raises, needs more than START_S to start or
    END_S to end, or is more than PENDING rows behind.
    """

    def __init__(self, name: str = "none", run: Path = Path(), config: dict | None = None):
        self._name, self._is_fed = name, name != "none"
        self._rows: queue.Queue = queue.Queue(PENDING)
        self._started, self._ended = threading.Event(), threading.Event()
        if self._is_fed:
            threading.Thread(target=self._feed, args=(run, config), daemon=True).start()
            if not self._started.wait(START_S):
                self._drop(f"did not start within {START_S} s")

    def _feed(self, run: Path, config: dict | None) -> None:
        try:
            dashboard = DASHBOARDS[self._name](run, config)
            self._started.set()
            while self._is_fed and (row := self._rows.get()) is not None:
                dashboard.log(row["step"], {k: v for k, v in row.items() if k != "step"})
            dashboard.close()
        except (Exception, SystemExit) as error:  # wandb exits without a key
            self._drop(f"{type(error).__name__}: {error}")
        self._started.set()
        self._ended.set()

    def log(self, rows: list[dict]) -> None:
        """Passes on rows of numbers, each with its `step`; returns at once."""
        for row in rows:
            self._put(row)

    def close(self) -> None:
        """Sends pending rows and ends."""
        self._put(None)
        if self._is_fed and not self._ended.wait(END_S):
            self._drop(f"did not end within {END_S} s")

    def _put(self, row: dict | None) -> None:
        try:
            if self._is_fed:
                self._rows.put_nowait(row)
        except queue.Full:
            self._drop(f"it is {PENDING} rows behind")

    def _drop(self, reason: str) -> None:
        if self._is_fed:
            print(f"logger={self._name} stopped ({reason}); training continues without it")
        self._is_fed = False

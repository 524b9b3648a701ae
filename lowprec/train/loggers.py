"""Dashboards, which copy the record. Training continues when one fails."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

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
    """Trackio, which has wandb's calls, in TRACKIO_DIR; `trackio show` displays it.

    Steps that a resumed run repeats appear twice.
    """

    def __init__(self, run: Path, config: dict):
        import trackio

        self._run = trackio.init("lowprec", run.name, resume="allow", config=config)
        self.close = self._run.finish


DASHBOARDS = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}


class Logger:
    """Feeds the dashboard that `logger.name` names; "none": no dashboard.

    The dashboards send rows in threads or processes of their own. One that raises, or needs more
    than END_S to end, is dropped with one message.
    """

    def __init__(self, name: str = "none", run: Path = Path(), config: dict | None = None):
        self._name, self._dashboard = name, None
        if name != "none":
            with self._dropping():
                self._dashboard = DASHBOARDS[name](run, config)

    def log(self, rows: list[dict]) -> None:
        """Passes on rows of numbers, each with its `step`."""
        with self._dropping():
            for row in rows if self._dashboard else ():
                self._dashboard.log(row["step"], {k: v for k, v in row.items() if k != "step"})

    def close(self) -> None:
        """Sends pending rows and ends."""
        if self._dashboard:
            thread = threading.Thread(target=self._end, daemon=True)
            thread.start()
            thread.join(END_S)
            if thread.is_alive():
                print(f"logger={self._name} did not end within {END_S} s")

    def _end(self) -> None:
        with self._dropping():
            self._dashboard.close()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # wandb exits without a key
            self._dashboard = None
            reason = f"{type(error).__name__}: {error}"
            print(f"logger={self._name} stopped ({reason}); training continues without it")

"""Dashboards, which copy the record. Training continues without one that fails."""

import threading
from collections.abc import Callable
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


DASHBOARDS = {"tensorboard": TensorBoard, "wandb": Wandb}


class Logger:
    """Feeds the dashboard that `logger.name` names ("none": no dashboard).

    The dashboard is dropped, with one message, when it raises or needs more than END_S to end.
    """

    def __init__(self, name: str = "none", run: Path = Path(), config: dict | None = None):
        self._name, self._dashboard = name, None
        if name != "none":
            self._dashboard = self._attempt(lambda: DASHBOARDS[name](run, config))

    def log(self, rows: list[dict]) -> None:
        """Logs rows of numbers, each with its `step`."""
        if self._dashboard is not None:
            self._attempt(lambda: self._log(rows))

    def _log(self, rows: list[dict]) -> None:
        for row in rows:
            values = {name: value for name, value in row.items() if name != "step"}
            self._dashboard.log(row["step"], values)

    def close(self) -> None:
        """Sends pending rows and ends."""
        if self._dashboard is not None:
            closing = threading.Thread(
                target=self._attempt, args=(self._dashboard.close,), daemon=True
            )
            closing.start()
            closing.join(END_S)
            if closing.is_alive():
                self._drop(f"did not end within {END_S} s")

    def _attempt(self, call: Callable) -> object:
        try:
            return call()
        except (Exception, SystemExit) as error:  # wandb exits without a key
            self._drop(f"{type(error).__name__}: {error}")

    def _drop(self, reason: str) -> None:
        print(f"logger={self._name} stopped ({reason}); training continues without it")
        self._dashboard = None

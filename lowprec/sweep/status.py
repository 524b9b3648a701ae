"""The state of each run of a sweep, and the table that shows it.

A state comes from the run's result, else the lock of its record, else its marks (`Plan.mark`), else
the queue: finished, diverged, running, cancelling (it still saves), cancelled, failed (with the
reason), queued; `new` was never submitted; `lost` was submitted, but nothing trains it and no
reason is recorded (the machine died).
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lowprec.config.compose import differing_values
from lowprec.runs.read import RecordFileError, read_last_row, read_status, scan_rows
from lowprec.sweep import local, slurm
from lowprec.sweep.plan import Plan, PlannedRun, is_locked

ACTIVE = ("queued", "running")
TO_SUBMIT = ("new", "cancelling", "cancelled", "lost")
TO_RESUBMIT = {"--failed": ("failed", "lost"), "--cancelled": ("cancelling", "cancelled")}


@dataclass
class State:
    """The state of a run, with its last row and speed, and why it failed or is lost."""

    index: int
    state: str
    step: int = 0
    loss: float | None = None
    reason: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    images_per_s: float | None = None


def states(plan: Plan, queue: list | None) -> list[State]:
    """The states of all runs. `queue`: the result of `slurm.queue()`, None if unavailable."""
    launcher_lives = is_locked(local.lock_path(plan.folder))
    jobs = {index: state for _, index, state in slurm.tasks(plan, queue or [])}
    by_run = []
    for run in plan.runs:
        is_training = plan.is_training(run.index)  # first: a run releases its lock at its end
        status, last, timing, damage = _read(plan.directory_of(run.index))
        step = max(status.get("step", 0), last.get("step", 0))  # a save alone writes the status
        if result := run.result(status):
            state, reason = result, status.get("reason", "")
        else:
            in_queue = "unknown" if queue is None else jobs.get(run.index)
            state, reason = _unfinished(plan, run, status, is_training, launcher_lives, in_queue)
        reason = "; ".join(filter(None, (reason, damage)))
        scores = {k: v for k, v in last.items() if "/" in k and isinstance(v, float)}
        speed = timing.get("images_per_s")
        speed = speed if isinstance(speed, float) and speed > 0 else None
        by_run.append(State(run.index, state, step, last.get("loss"), reason, scores, speed))
    return by_run


def _read(directory: Path) -> tuple[dict, dict, dict, str]:
    """A run's status, last row of metrics and of timing, and which of these files is damaged."""
    rows, faults = [], []
    files = [(read_status, directory)]
    files += [(read_last_row, directory / f"{name}.jsonl") for name in ("metrics", "timing")]
    for read, path in files:
        try:
            rows.append(read(path))
        except FileNotFoundError:
            rows.append({})
        except RecordFileError as error:
            rows.append({})
            faults.append(str(error))
    return *rows, "; ".join(faults)


def _unfinished(
    plan: Plan,
    run: PlannedRun,
    status: dict,
    is_training: bool,
    launcher_lives: bool,
    in_queue: str | None,
) -> tuple[str, str]:
    """State and reason of a run that has no result; `in_queue`: its job's."""
    on_slurm = run.launcher == "slurm"
    saves = on_slurm and in_queue in ("RUNNING", "COMPLETING")
    if plan.is_cancelled(run.index):
        return "cancelling" if is_training or saves else "cancelled", ""
    if is_training:
        return "running", ""
    if (reason := plan.why_ended(run.index)) is not None:
        return "failed", reason
    if run.launcher is None:
        return "new", ""
    if on_slurm and in_queue is not None:
        return "queued" if in_queue in (*slurm.WAITS, "unknown") else "running", ""
    if run.launcher == "local" and launcher_lives and not plan.mark(run.index, "lost").exists():
        return "queued", ""
    if status.get("state") == "failed":
        return "failed", status.get("reason", "")
    if not on_slurm:
        return "lost", "the process that trained it is gone"
    return "lost", "its job is no longer in the queue" + _end_of(plan.log_of(run.index))


def _end_of(log: Path) -> str:
    """The end of a log, where SLURM says if it has killed a job; "" if there is no log."""
    try:
        lines = log.read_bytes()[-1000:].decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = "; ".join([line.strip() for line in lines if line.strip()][-2:])
    return f" (the log ends with: {said[-300:]})" if said else ""


def ask_queue(plan: Plan) -> list | None:
    """The SLURM queue if a run may be in it, [] if none is, None if squeue gives no answer."""
    if not any(run.launcher == "slurm" and not plan.is_cancelled(run.index) for run in plan.runs):
        return []
    try:
        return slurm.queue()
    except slurm.SlurmError:
        return None


def summary(run_states: list[State]) -> str:
    """`3 finished, 1 failed`."""
    counts = Counter(state.state for state in run_states)
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def steps(plan: Plan, run_states: list[State]) -> str:
    """`run 0 at step 12 of 50, run 1 starting`: up to four of the running runs, or nothing.

    A run is starting until it has recorded a step.
    """
    running = [state for state in run_states if state.state == "running"]
    last = [plan.runs[state.index].config["num_steps"] for state in running]
    texts = [
        f"run {state.index} " + (f"at step {state.step} of {num}" if state.step else "starting")
        for state, num in zip(running[:4], last, strict=False)
    ]
    return ", ".join([*texts, *["..."] * (len(running) > 4)])


def _time_left(state: State, config: dict) -> str:
    """Hours, minutes and seconds of training that remain; "" unless it is running."""
    if state.state != "running" or state.images_per_s is None:
        return ""
    images = (config["num_steps"] - state.step) * config.get("batch_size", 0)
    return str(timedelta(seconds=min(round(images / state.images_per_s), 10**9)))


def setting_columns(runs: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """The keys in which runs differ by their overrides, and each run's values."""
    own = differing_values(runs)
    keys = list(dict.fromkeys(key for values in own for key in values))
    return keys, [[values.get(key, "") for key in keys] for values in own]


def print_table(names: list[str], rows: list[list[str]], console: Console) -> None:
    """Prints a table without its empty columns; long values are folded, not cut."""
    filled = [i for i in range(len(names)) if any(row[i] for row in rows)]
    columns = [Column(re.sub(r"[./](?=\w\w)", "\n", names[i]), overflow="fold") for i in filled]
    table = Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(Text(row[i]) for i in filled))
    console.print(table)


def number(row: dict, name: str) -> str:
    """A loss, or a score in percent, of a row of metrics; empty if the row lacks it."""
    form = ".3f" if name.endswith("loss") else ".1%"
    return f"{row[name]:{form}}" if name in row else ""


def show(plan: Plan, run_states: list[State], queue: list | None, console: Console) -> None:
    """Prints a row per run: settings, progress, digest; then reasons, collapses, a summary."""
    scores = list(dict.fromkeys(name for state in run_states for name in state.scores))[:1]
    keys, settings = setting_columns([run.overrides for run in plan.runs])
    names = ["run", *(keys or ["label"]), "state", "step", "last loss", *scores]
    rows, lines = [], []
    for state, run, values in zip(run_states, plan.runs, settings, strict=True):
        own = zip(keys, values, strict=True)
        name = " ".join(f"{key}={value}" for key, value in own if value) or run.label
        step = f"{state.step}/{run.config['num_steps']}"
        loss = "" if state.loss is None else f"{state.loss:.3f}"
        numbers = [number(state.scores, key) for key in scores]
        numbers += ["" if state.images_per_s is None else f"{state.images_per_s:,.0f}"]
        numbers += [_time_left(state, run.config), run.directory.rpartition("-")[2]]
        rows.append([str(run.index), *(values or [run.label]), state.state, step, loss, *numbers])
        if state.reason:
            line = f"run {run.index} ({name}) {state.state}: {state.reason}"
            log = plan.log_of(run.index)
            has_log = state.state in TO_RESUBMIT["--failed"] and log.exists()
            lines.append(line + f"; log: {log}" * has_log)
        for event in scan_rows(plan.directory_of(run.index) / "events.jsonl")[0]:
            for verdict in event.keys() & {"collapsed", "not_learning"}:
                text = f"{verdict.replace('_', ' ')}: {event[verdict]}"
                lines.append(f"run {run.index} ({name}) {text}")
    if queue is None:
        lines.append("squeue does not answer: the states of queued runs are the last known ones")
    print_table([*names, "images/s", "left", "folder"], rows, console)
    parents = dict.fromkeys(plan.directory_of(run.index).parent for run in plan.runs)
    folders = [f"folders: {parent}/*-FOLDER" for parent in parents]
    for line in (*folders, *lines, summary(run_states)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)

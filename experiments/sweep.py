"""Trains a sweep in the background, here or on SLURM, without losing or repeating runs.

    python -m experiments.sweep submit experiment=loss_curves_mini seed=0,1 launcher=slurm
    python -m experiments.sweep status experiment=loss_curves_mini
    python -m experiments.sweep wait experiment=loss_curves_mini
    python -m experiments.sweep resubmit --failed experiment=loss_curves_mini launcher.mem_gb=128
    python -m experiments.sweep cancel experiment=loss_curves_mini

`submit` takes the keys of a run (a value may be a list), `launcher=local|slurm`, `launcher.*` and
`dry_run=true`, which only prints the runs. It reports all faults of all runs before it submits any,
writes its own files to `<run_dir>/sweeps/<experiment or name>/` and returns at once. Repeating it
adds new runs and submits cancelled or lost ones. The other verbs find the sweep by `experiment=` or
`name=` and `run_dir=`, or use the only one there is. `wait` exits with 1 if a run has no result.
`resubmit` submits runs that failed or were lost (`--failed`) or cancelled (`--cancelled`). It takes
the last launcher, changed by `launcher.*`, or another one by `launcher=`, and `dry_run=true`.
`<verb> --help` lists a verb's options.
"""

import inspect
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console

from experiments.entry import refuse
from experiments.train import main as train_run
from lowprec.config.check import ConfigError, RunError, check, unknown_key
from lowprec.config.check import keys as schema_keys
from lowprec.config.compose import compose_command, explain
from lowprec.config.overrides import plain_values
from lowprec.config.schema import Config, key
from lowprec.data.open import open_data
from lowprec.nearest import nearest
from lowprec.runs.durable import locked
from lowprec.runs.read import ENDED, is_copy
from lowprec.sweep import local, slurm
from lowprec.sweep.plan import DECLINED, Plan, plan_runs, refuse_processes
from lowprec.sweep.status import (
    ACTIVE,
    TO_RESUBMIT,
    TO_SUBMIT,
    State,
    ask_queue,
    show,
    states,
    steps,
    summary,
)
from lowprec.train.ranks import place
from lowprec.train.source_digests import sources_of
from lowprec.waiting import Waiting

POLL_S = 2.0
GRACE_S = 60.0  # for training that saves


@dataclass
class LauncherConfig:
    """How runs are trained; conf/launcher/ has a file per launcher."""

    name: str = key("local", "what trains the runs", choices=("local", "slurm"))
    parallel: int = key(1, "runs at the same time", least=1)
    gpus: int = key(0, "GPUs per run, one process each; 0: all visible ones", least=0)
    runs_per_gpu: int = key(1, "runs that may share a GPU (local, with gpus=1 or more)", least=1)
    cpus: int | None = key(None, "cores per run (slurm)", least=1)
    mem_gb: int | None = key(None, "memory per run (slurm)", least=1)
    timeout_min: int = key(60, "time limit, after which a run is requeued (slurm)", least=1)
    signal_s: int = key(180, "seconds before the limit at which a run saves (slurm)", least=1)
    partition: str | None = key(None, "the cluster's partition (slurm)")
    setup: list[str] = key([], "lines of the batch script, such as 'module load cuda' (slurm)")
    sbatch: dict | None = key(None, "other flags of sbatch, such as {account: NAME} (slurm)")


@dataclass
class SweepConfig:
    """The keys of a sweep, in addition to those of its runs."""

    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    dry_run: bool = key(False, "print the runs and submit nothing")


def submit(texts: list[str]) -> None:
    """Writes the runs, then submits those that have no result and are not being trained.

    KEY=VALUE,...  a key of the runs and one value or several, which become one run each;
                   `python -m experiments.train --help` explains the keys
    """
    launching, overrides = _split(texts)
    options = _options(launching)
    processes = max(1, options.launcher.gpus)
    runs = plan_runs(overrides, lambda config: sources_of(config, open_data(config)), processes)
    folder = _folder(overrides)
    others = sorted({run.config["run_dir"] for run in runs})
    if [Path(text) for text in others] != [folder.parents[1]]:  # set by an experiment's file
        fault = f"run_dir={','.join(others)}: a sweep has one run_dir, named on the command line"
        raise ConfigError([f"{fault}, such as run_dir={others[0]}"])
    if options.dry_run:
        print("\n".join(str(folder.parents[1] / run.directory) for run in runs))
        return
    with locked(folder / ".lock"):
        plan = Plan.open(folder)
        hand_over(plan, plan.add(runs), TO_SUBMIT, asdict(options.launcher))


def resubmit(texts: list[str]) -> None:
    """Submits runs again.

    --failed  submits runs that failed or were lost
    --cancelled  submits cancelled runs
    """
    for word in texts:
        if word.startswith("-") and word not in TO_RESUBMIT:
            raise ConfigError([f"{word}: no such option{nearest(word, TO_RESUBMIT)}"])
    which = tuple(state for word in texts for state in TO_RESUBMIT.get(word, ()))
    if not which:
        text = "which runs? python -m experiments.sweep resubmit --failed (or --cancelled) ..."
        raise ConfigError([text])
    launching, overrides = _split(texts)
    folder = _find([text for text in overrides if text not in TO_RESUBMIT]).folder
    with locked(folder / ".lock"):
        plan = Plan(folder)
        if not plan.launchers:
            raise RunError(
                "nothing in this sweep was submitted: python -m experiments.sweep submit"
            )
        launcher, dry_run = _relaunch(plan, launching)
        hand_over(plan, [run.index for run in plan.runs], which, launcher, dry_run)


def _relaunch(plan: Plan, launching: list[str]) -> tuple[dict, bool]:
    """The plan's last launcher with the given changes, or another one; and `dry_run`."""
    last = list(plan.launchers.values())[-1]
    options = _options([f"launcher={last['name']}", *launching])
    settings, keys = asdict(options.launcher), [text.partition("=")[0] for text in launching]
    given = [key.partition(".")[2] or "name" for key in keys if key.startswith("launcher")]
    if "name" in given:
        return settings, options.dry_run
    kept = {k: v for k, v in last.items() if k in settings and k not in given}
    return settings | kept, options.dry_run


def status(texts: list[str]) -> None:
    """Prints the table of a sweep once."""
    plan = _find(texts)
    queue = ask_queue(plan)
    _show(plan, states(plan, queue), queue)


def wait(texts: list[str]) -> None:
    """Prints the summary when it changes, then the table; exits with 1 if a result is missing.

    In between, it prints how far the running runs are.
    """
    folder, looks, line = _find(texts).folder, 0, ""
    with closing(Waiting("waiting")) as waiting:
        while looks < 2:  # between two launchers, a run seems lost for a moment
            time.sleep(POLL_S if line else 0.0)
            plan = Plan(folder)
            queue = ask_queue(plan)
            run_states = states(plan, queue)
            if summary(run_states) != line:
                line = summary(run_states)
                print(time.strftime("%H:%M:%S"), line, flush=True)
            waiting.doing = steps(plan, run_states) or line
            is_active = any(state.state in (*ACTIVE, "cancelling") for state in run_states)
            looks = 0 if is_active else looks + 1
    _show(plan, run_states, queue)
    if any(state.state not in ENDED for state in run_states):
        sys.exit(1)


def cancel(texts: list[str]) -> None:
    """Cancels waiting and lost runs and stops running ones, which save first."""
    folder = _find(texts).folder
    with locked(folder / ".lock"):
        plan = Plan(folder)
        waiting = plan.waiting()  # also lost runs, which a launcher may yet begin
        run_states = states(plan, ask_queue(plan))
        active = [s.index for s in run_states if s.state in ACTIVE or s.index in waiting]
        for index in active:  # first: a run that is told to stop must not be started again
            plan.mark(index, "cancelled").touch()
        again = shlex.join(["python", "-m", "experiments.sweep", "resubmit", "--cancelled", *texts])
        print(f"{len(active)} runs cancelled; to continue them: {again}")
        slurm.cancel(plan)  # also jobs that an earlier `cancel` did not reach


def train(texts: list[str]) -> None:
    """`train FOLDER INDEX`: trains one run by the config that `submit` wrote; for launchers."""
    folder, index = texts
    plan, index = Plan(Path(folder)), int(index)
    rank, size = place()[:2]
    if rank == 0:
        deadline = time.monotonic() + GRACE_S
        while plan.is_training(index) and time.monotonic() < deadline:
            time.sleep(0.1)  # what a killed launcher has started saves
    is_elsewhere = rank == 0 and plan.is_training(index)
    if is_elsewhere or plan.is_cancelled(index):
        why = "is trained by another process" if is_elsewhere else "is cancelled"
        print(f"run {index} {why}; nothing to do")
        sys.exit(DECLINED if size > 1 else 0)
    config = check(plan.runs[index].config)
    if Path(config.run_dir).resolve() != plan.run_dir.resolve():
        config.run_dir = str(plan.run_dir)  # called in another directory than `submit`
    try:
        train_run(config, expected=str(Path(config.run_dir) / plan.runs[index].directory))
    except (ConfigError, RunError) as error:
        if place()[0] == 0:
            plan.end(index, str(error).rpartition(" failed: ")[2][:400])
        raise


def hand_over(
    plan: Plan, runs: list[int], which: tuple[str, ...], launcher: dict, dry_run: bool = False
) -> None:
    """Submits the runs whose state is one of `which`, and says which it left alone.

    With `dry_run`, prints the directories of these runs and submits nothing.
    """
    queue = slurm.queue() if launcher["name"] == "slurm" else ask_queue(plan)
    if queue is None:
        raise slurm.SlurmError("squeue does not answer; try again once it does")
    run_states = [state for state in states(plan, queue) if state.index in runs]
    submitted = [state.index for state in run_states if state.state in which]
    if launcher["gpus"] > 1:  # `resubmit` may have changed it
        refuse_processes([plan.runs[index] for index in submitted], launcher["gpus"])
    if dry_run:
        print("".join(f"{plan.directory_of(index)}\n" for index in submitted), end="")
        return
    if submitted:
        plan.hand_over(submitted, launcher)
        if launcher["name"] == "slurm":
            slurm.submit(plan, submitted, launcher)
    if launcher["name"] == "local":
        asked = {state.index for state in run_states if state.state in (*which, "running")}
        local.start(plan, asked)
    others = [state for state in run_states if state.state not in which]
    count = f"{len(submitted)} of {len(runs)} runs submitted"
    print(f"{plan.folder}: {count}" + f"; {summary(others)}" * bool(others))
    _print_resubmit(plan, others)
    print("to see them:", _command(plan, "status"))


def _split(texts: list[str]) -> tuple[list[str], list[str]]:
    """The overrides of SweepConfig, and the others."""
    keys = ("launcher", "dry_run")
    launching = [text for text in texts if text.partition("=")[0].partition(".")[0] in keys]
    return launching, [text for text in texts if text not in launching]


def _options(launching: list[str]) -> SweepConfig:
    """The sweep's own keys, checked; ConfigError if they do not fit each other."""
    options = compose_command(launching, "sweep", SweepConfig)[0].config
    launcher = options.launcher
    if launcher.runs_per_gpu > 1 and (launcher.name != "local" or not launcher.gpus):
        fault = f"launcher.runs_per_gpu={launcher.runs_per_gpu}"
        raise ConfigError([f"{fault} needs launcher=local and launcher.gpus=1 or more"])
    own = [name for name in launcher.sbatch or () if str(name).replace("-", "_") in slurm.OWN_FLAGS]
    if own:
        raise ConfigError([f"launcher.sbatch: a sweep sets {name} itself" for name in own])
    return options


def _folder(overrides: list[str]) -> Path:
    values = plain_values(overrides)
    name = values.get("experiment") or values.get("name") or "run"
    return Path(values.get("run_dir", "runs")) / "sweeps" / name


def _show(plan: Plan, run_states: list[State], queue: list | None) -> None:
    """Prints the table, on a wide page where the output is redirected."""
    show(plan, run_states, queue, Console(width=None if sys.stdout.isatty() else 200))
    _print_resubmit(plan, run_states)


def _print_resubmit(plan: Plan, run_states: list[State]) -> None:
    """Prints the command that submits failed and lost runs again, if there are any."""
    if any(state.state in TO_RESUBMIT["--failed"] for state in run_states):
        print("to submit failed and lost runs again:", _command(plan, "resubmit", "--failed"))


def _command(plan: Plan, *words: str) -> str:
    run_dir = plan.folder.parent.parent
    place = [] if run_dir == Path("runs").absolute() else [f"run_dir={run_dir}"]
    words = (*words, f"name={plan.folder.name}", *place)
    return shlex.join(["python", "-m", "experiments.sweep", *words])


def _find(texts: list[str]) -> Plan:
    """The sweep that `experiment=`, `name=` and `run_dir=` name, or the only one there is."""
    keys, allowed = {text.partition("=")[0] for text in texts}, ("experiment", "name", "run_dir")
    own = set(schema_keys(Config))  # of a run
    faults = [
        f"{name}: only `submit` takes keys of runs; with another value it adds a run"
        if name in own
        else unknown_key(name, allowed)
        for name in sorted(keys.difference(allowed))
    ]
    faults += [f"{text}: key=value is expected" for text in texts if not text.partition("=")[2]]
    if faults:
        raise ConfigError(faults)
    folder = _folder(texts)
    names = sorted(path.parent.name for path in folder.parent.glob("*/sweep.json"))
    names = [name for name in names if not is_copy((name,))]
    if not keys & {"experiment", "name"} and len(names) == 1:
        folder = folder.parent / names[0]
    if not (folder / "sweep.json").exists():
        fault = f"{folder}: no such sweep; the sweeps are {', '.join(names)}"
        if not names:
            start = "`python -m experiments.sweep submit ...` starts one"
            fault = f"no sweeps in {folder.parent} yet; {start}"
        if (runs := folder.parents[1] / folder.name).is_dir():
            fault += (
                f"; {runs} has runs of `experiments.train`, which keeps no list of the runs to "
                "come: `submit` with the same keys does and continues them"
            )
        raise ConfigError([fault + nearest(folder.name, names)])
    return Plan(folder)


VERBS: dict[str, Callable[[list[str]], None]] = {
    verb.__name__: verb for verb in (submit, status, resubmit, cancel, wait, train)
}


FIND = """\
experiment=NAME or name=NAME  the sweep; may be left out if there is only one
run_dir=runs  the folder of the sweep's runs"""


def _help(verb: str) -> str:
    """What a verb does, and each of its options with a sentence or its default and meaning."""
    lines = [f"python -m experiments.sweep {verb} ...", inspect.getdoc(VERBS[verb])]
    lines += [FIND] if verb not in ("submit", "train") else []
    lines += [explain("sweep", SweepConfig)] if verb in ("submit", "resubmit") else []
    return "\n\n".join(lines)


def command(arguments: list[str]) -> None:
    """`<verb> key=value ...`; faults in the config exit with 2, other failures with a message."""
    verb, *texts = arguments or [""]
    if verb in ("-h", "--help"):
        print(__doc__.strip())
        return
    if verb in VERBS and {"-h", "--help"} & set(texts):
        print(_help(verb))
        return
    try:
        if verb not in VERBS:
            verbs = [name for name in VERBS if name != "train"]  # that one is for launchers
            fault = f"{verb or 'no verb'}: one of {', '.join(verbs)} is expected"
            raise ConfigError([fault + nearest(verb, verbs)])
        VERBS[verb](texts)
    except ConfigError as error:
        refuse(error)
    except RunError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Runs that were submitted go on until `cancel`.")


if __name__ == "__main__":
    command(sys.argv[1:])

"""SLURM's commands fail, hang or do more than they say: shims of them, first on PATH."""

import pytest

from experiments import sweep
from lowprec.sweep import slurm
from lowprec.sweep.plan import Plan
from lowprec.sweep.slurm import SlurmError

LAUNCHER = {"name": "slurm", "parallel": 8, "gpus": 0, "cpus": 1, "mem_gb": 1, "timeout_min": 60}
LAUNCHER |= {"signal_s": 60, "partition": "low", "setup": [], "sbatch": None}


@pytest.mark.parametrize("failures", [0, 4])
def test_a_submission_is_tried_until_it_goes_through_once(cluster, sweeps, shim, failures):
    cluster(failures)
    sweeps.make(3)
    for _ in range(2):
        sweeps.submit(**LAUNCHER)
        assert sweeps.names() == ["queued"] * 3
        assert len(shim.calls("sbatch")) == failures + 1


@pytest.mark.parametrize("arrived", [True, False])
def test_a_killed_submit_repeats_nothing(cluster, sweeps, shim, monkeypatch, arrived):
    sweeps.make(3)
    submit = slurm.submit

    def die(*arguments):
        if arrived:
            submit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(slurm, "submit", die)
        sweeps.submit(**LAUNCHER)
    assert sweeps.names() == ["queued" if arrived else "lost"] * 3
    sweeps.submit(**LAUNCHER)
    assert len(shim.calls("sbatch")) == 1
    assert sweeps.names() == ["queued"] * 3


def test_a_sweep_of_the_same_name_elsewhere_has_other_jobs(cluster, sweeps, here):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    other = Plan.open(here / "other" / "sweeps" / "t")
    assert slurm.tasks(other, slurm.queue()) == [] != slurm.tasks(sweeps.plan, slurm.queue())
    (here / "link").symlink_to(sweeps.folder)
    through = Plan(here / "link")
    assert slurm.tasks(through, slurm.queue()) == slurm.tasks(sweeps.plan, slurm.queue())


HANGS = "exec sleep 60 > /dev/null 2>&1"
FAILS = "echo 'Socket timed out on send/recv operation' >&2; exit 1"


@pytest.mark.parametrize(
    ("arrives", "then"), [(True, FAILS), (True, HANGS), (False, HANGS)], ids=str
)
def test_a_silent_sbatch_is_not_repeated(cluster, sweeps, shim, monkeypatch, arrives, then):
    shim("sbatch", (cluster.sbatch if arrives else "") + then)
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.3)
    sweeps.make(3)
    if arrives:
        sweeps.submit(**LAUNCHER)
        assert sweeps.names() == ["queued"] * 3
    else:
        with pytest.raises(SlurmError, match="sbatch failed 5 times: no answer in 0.3 s"):
            sweeps.submit(**LAUNCHER)
    assert len(shim.calls("sbatch")) == (1 if arrives else 5)


def test_a_machine_without_slurm_is_named_and_the_runs_stay_new(sweeps, monkeypatch):
    monkeypatch.setenv("PATH", "")
    sweeps.make(1)
    with pytest.raises(SlurmError, match="squeue: no such command"):
        sweeps.submit(**LAUNCHER)
    assert sweeps.names() == ["new"]


def test_the_batch_script_has_the_launchers_flags_and_a_run_per_task(cluster, sweeps):
    sweeps.make(3)
    sweeps.plan.hand_over([1], LAUNCHER)
    sweeps.plan.end(1, "no")
    more = {"setup": ["module load cuda"], "sbatch": {"account": "us"}, "gpus": 2}
    sweeps.submit(**LAUNCHER | more)
    (script,) = [path.read_text() for path in (sweeps.folder / "slurm").glob("77*.sh")]
    flags = ["array=0,2%8", "partition=low", "time=60", "mem=1G", "requeue", "signal=USR2@60"]
    flags += ["account=us", "gpus-per-node=2", "cpus-per-task=1", "ntasks-per-node=2"]
    lines = script.replace("'", "").splitlines()
    assert {f"#SBATCH --{flag}" for flag in flags} <= set(lines) and "wckey" not in script
    assert script.index("module load cuda") < script.index("requeue.sh") < script.index("srun")
    assert lines[-1].endswith(f"experiments.sweep train {sweeps.folder} $SLURM_ARRAY_TASK_ID")


def test_a_users_flag_of_sbatch_wins_and_is_written_once(cluster, sweeps):
    sweeps.make(1)
    own = {"cpus-per-task": 3, "mem": 0, "nice": 0, "time": 5, "requeue": False, "comment": None}
    sweeps.submit(**LAUNCHER | {"sbatch": own})
    (script,) = [path.read_text() for path in (sweeps.folder / "slurm").glob("77*.sh")]
    flags = [line.removeprefix("#SBATCH --") for line in script.splitlines() if "#SBATCH" in line]
    assert {"cpus-per-task=3", "mem=0", "nice=0", "time=5"} <= set(flags)
    names = [flag.partition("=")[0] for flag in flags]
    assert len(names) == len(set(names)) and not {"requeue", "comment"} & set(names)


def test_a_queue_that_gives_no_answer_changes_no_state(cluster, sweeps):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    cluster(10**6)
    assert sweeps.names() == ["queued"] * 3
    with pytest.raises(SlurmError, match=r"squeue.*Unable to contact"):
        sweeps.submit(**LAUNCHER)


def test_cancel_is_recorded_first_and_can_be_repeated(cluster, sweeps, shim):
    sweeps.make(3)
    sweeps.submit(**LAUNCHER)
    shim("scancel", "ls runs/sweeps/t/runs | grep -c cancelled > seen; exit 1")
    with pytest.raises(SlurmError, match="scancel failed 5 times"):
        sweep.cancel([])
    assert (sweeps.here / "seen").read_text() == "3\n"
    assert sweeps.names() == ["cancelled"] * 3
    shim("scancel", "rm queue")
    sweep.cancel([])
    assert shim.calls("scancel")[-1] == "scancel --quiet 77_0 77_1 77_2"
    sweep.cancel([])
    assert len(shim.calls("scancel")) == 6  # none if nothing is in the queue


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["launcher.mem_gb=7"], {"mem_gb": 7}),
        (["launcher=local"], {"name": "local", "parallel": 1, "mem_gb": None, "partition": None}),
    ],
)
def test_resubmit_changes_the_last_launcher(cluster, sweeps, no_launcher, words, changed):
    sweeps.make(3)
    before = LAUNCHER | {"setup": ["module load cuda"], "sbatch": {"account": "us"}}
    sweeps.submit(**before)
    sweeps.plan.end(1, "no")
    (sweeps.here / "queue").unlink()
    for index in (0, 2):
        sweeps.plan.mark(index, "cancelled").touch()
    sweep.resubmit(["--failed", *words])
    *_, last = sweeps.plan.launchers.values()
    assert [run.launcher == last["name"] for run in sweeps.plan.runs][1]
    assert sweeps.plan.why_ended(1) is None and sweeps.names()[::2] == ["cancelled"] * 2
    kept = {} if words == ["launcher=local"] else before
    assert last.items() >= (kept | changed).items()


def test_a_line_break_in_a_flag_adds_no_line_to_the_batch_script(cluster, sweeps, shim):
    sweeps.make(1)
    with pytest.raises(SlurmError, match="partition='low.ntouch' has a character that cannot be"):
        sweeps.submit(**LAUNCHER | {"partition": "low\ntouch"})
    assert not shim.calls("sbatch") and not list(sweeps.folder.glob("slurm/*"))


def test_a_submission_to_slurm_starts_no_launcher(cluster, sweeps, monkeypatch):
    plan = sweeps.make(2)
    plan.hand_over([0], {"name": "local", "parallel": 1, "gpus": 0})
    monkeypatch.setattr(sweep.local, "start", lambda *_: pytest.fail("started"))
    sweeps.submit([1], **LAUNCHER)
    assert sweeps.names() == ["lost", "queued"]

"""This process's rank and the number of processes in its run, without torch."""

import os

# below the ports that Linux gives to outgoing connections (32768 and above), one of which may be
# in use by chance when rank 0 wants to listen
PORTS = range(20_000, 32_000)


def place() -> tuple[int, int, int, int]:
    """Rank and number of processes, overall and on this machine, as torchrun or SLURM set them.

    Under `srun` and submitit this also sets the variables that torch reads (MASTER_ADDR, ...).
    There is one process without a launcher, and in the shell of an interactive job.
    """
    variables = os.environ
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        local_tasks = variables.get("SUBMITIT_LOCAL_NTASKS", "1")
        if int(variables.get("SLURM_STEP_NUM_TASKS", local_tasks)) == 1:
            return 0, 1, 0, 1
        _set_torchrun_variables()
    size = int(variables["WORLD_SIZE"])
    local_rank = int(variables.get("LOCAL_RANK", 0))
    return int(variables["RANK"]), size, local_rank, int(variables.get("LOCAL_WORLD_SIZE", size))


def _set_torchrun_variables() -> None:
    """Sets RANK, MASTER_ADDR and the others from the variables of srun or submitit."""
    from submitit import JobEnvironment  # slow, and needed here only
    from submitit.helpers import TorchDistributedEnvironment

    executor = os.environ.get("SUBMITIT_EXECUTOR")
    os.environ.setdefault("SUBMITIT_EXECUTOR", "slurm")  # srun alone does not set it
    try:
        ranks = TorchDistributedEnvironment()
        if ranks.local_world_size == ranks.world_size:  # the node's name need not resolve
            ranks.master_addr = "127.0.0.1"
        if "MASTER_PORT" not in os.environ:
            # submitit's id of a task of an array, 7_1, may lead to the port of another job
            job = os.environ.get("SLURM_JOB_ID") or JobEnvironment().job_id
            ranks.master_port = PORTS[sum(map(int, job.split("_"))) % len(PORTS)]
        ranks.export(set_cuda_visible_devices=False, overwrite=True)
    finally:
        if executor is None:
            del os.environ["SUBMITIT_EXECUTOR"]

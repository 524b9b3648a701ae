"""Where a process stands, by the variables that its launcher sets."""

import os

import pytest

from lowprec.train.ranks import place

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1)),
        (TORCHRUN, (5, 8, 1, 4)),
        ({"WORLD_SIZE": "8"}, (0, 1, 0, 1)),  # some images set it for everybody
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, (0, 1, 0, 1)),  # a shell
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0, 1)),
        ({**TORCHRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, (5, 8, 1, 4)),
    ],
    ids=["alone", "torchrun", "half of it", "interactive job", "srun of one", "torchrun in srun"],
)
def test_place_of_a_process_follows_its_launcher(monkeypatch, environment, expected):
    monkeypatch.setattr(os, "environ", environment)
    assert place() == expected


@pytest.mark.parametrize("array", [{}, {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}])
@pytest.mark.parametrize(
    ("nodes", "num_nodes", "local", "address"),
    [("node[1-2]", 2, (1, 2), "node1"), ("node1", 1, (3, 4), "127.0.0.1")],
    ids=["two nodes", "one node, whose name may lead nowhere"],
)
def test_a_task_of_srun_finds_the_others(monkeypatch, nodes, num_nodes, local, address, array):
    slurm = array | {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
    slurm |= {"SLURM_PROCID": "3", "SLURM_LOCALID": str(local[0])}
    slurm |= {"SLURM_JOB_NODELIST": nodes, "SLURM_JOB_NUM_NODES": str(num_nodes)}
    slurm |= {"SLURM_NODEID": str(num_nodes - 1)}
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is exported is taken back
        monkeypatch.delenv(name)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert place() == (3, 4, *local)

    assert os.environ["MASTER_ADDR"] == address and os.environ["MASTER_PORT"] == "20007"
    assert place() == (3, 4, *local)

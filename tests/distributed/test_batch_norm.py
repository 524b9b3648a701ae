"""Batch norm of several processes is that of the whole batch, or is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

RESNET = {"model.name": "RN50", "model.image_size": 64, "model.embed_dim": 64}
SIZES = ("vision_width", "vision_layers", "text_width", "text_layers", "heads", "patch_size")
RESNET |= {f"model.{size}": None for size in SIZES}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed")
def test_two_gpus_give_the_gradients_and_statistics_of_one(make, tmp_path):
    synchronized = {"distributed.name": "ddp", "distributed.sync_bn": True, "deterministic": True}
    config = make({**RESNET, **synchronized, "device": "cuda"})
    code = (
        "import json, sys; from pathlib import Path; import torch; import jobs;"
        "torch.backends.cudnn.allow_tf32 = False;"
        "folder, rank, size, config = json.loads(sys.argv[1]);"
        "jobs.gradients(Path(folder), rank, size, configs={str(size): config})"
    )
    for size in (1, 2):
        place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29473"}
        root, here = Path(__file__).parents[2], Path(__file__).parent
        paths = [str(root), str(here), os.environ.get("PYTHONPATH", "")]
        place |= {"PYTHONPATH": os.pathsep.join(paths), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, json.dumps([str(tmp_path), rank, size, config])],
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]
        assert [process.wait(timeout=200) for process in processes] == [0] * size
    expected = torch.load(tmp_path / "1.0.pt")
    for rank in range(2):
        saved = torch.load(tmp_path / f"2.{rank}.pt")
        assert set(saved) == set(expected) and any("running_var" in name for name in saved)
        for name, value in expected.items():
            largest = max(float(value.abs().max()), 1e-3)
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-3 * largest, msg=name)

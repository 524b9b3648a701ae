"""Secrets in the environment reach no file, no dashboard and no line of output."""

import os
from pathlib import Path

import pytest

from experiments import train
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.runs.read import find_runs
from tests.small import WORDS, python

CANARIES = {  # variable: value
    "WANDB_API_KEY": "c4n4ry" + "0123456789abcdef" * 2 + "ab",  # of the length that wandb takes
    "HF_TOKEN": "hf_c4n4ry-of-hugging-face",
    "HUGGING_FACE_HUB_TOKEN": "hf_c4n4ry-of-the-hub",
    "AWS_SECRET_ACCESS_KEY": "c4n4ry/of+the/cloud",
    "GITHUB_TOKEN": "ghp_c4n4ry",
    "https_proxy": "http://me:c4n4ry-proxy@localhost:9",
    "DATABASE_URL": "postgres://me:c4n4ry-db@localhost/x",
}
SECRET = b"c4n4ry"


def leaks(folder: Path) -> list[Path]:
    """Files and folders below `folder` that hold the secret, in their name or their bytes."""
    return [
        path
        for path in folder.rglob("*")
        if SECRET in os.fsencode(path.name) or path.is_file() and SECRET in path.read_bytes()
    ]


def test_a_sweep_with_a_dashboard_leaks_nothing(squares, tmp_path):
    """Everything is imported with the secrets in the environment, too."""
    pytest.importorskip("wandb")
    keys = [*WORDS, "++num_steps=4", "log_every=2", "num_workers=1", "evaluation=none"]
    keys += ["data=shards", f"data.train={squares}/train-*.tar", "logger=wandb"]
    keys += ["batch_size=5000,16", f"data.index={tmp_path}/index"]  # the run counts the pairs
    own = {"HYDRA_FULL_ERROR": "1", "WANDB_MODE": "offline", **CANARIES}
    done = python("-m", "experiments.train", "-m", *keys, cwd=tmp_path, **own)
    assert done.returncode == 1 and "run 1 failed: " in done.stderr
    assert SECRET.decode() not in done.stdout + done.stderr
    (copied,) = tmp_path.rglob("*.wandb")
    assert b"num_steps" in copied.read_bytes()
    assert b"++num_steps" not in copied.read_bytes()  # a command line may hold a password
    assert find_runs(tmp_path) and leaks(tmp_path) == []


INTERPOLATIONS = (
    *(rf"{key}=$\{{oc.env:TOKEN\}}" for key in ("name", "run_dir", "data.train")),
    r"name=a,$\{oc.env:TOKEN\}",
    r"name=$\{oc.decode:$\{oc.env:TOKEN\}\}",
    r"data.allow_remote=[https,$\{oc.env:TOKEN\}]",
    "hydra.launcher.comment=${oc.env:TOKEN}",
    r"hydra.launcher.setup=[a,$\{oc.env:TOKEN\}]",
)


@pytest.mark.parametrize("override", INTERPOLATIONS)
def test_an_interpolation_is_refused_before_it_is_resolved(override, monkeypatch):
    monkeypatch.setenv("TOKEN", "c4n4ry")
    with pytest.raises(ConfigError) as error:
        compose_command([override], multirun=True)
    key = override.partition("=")[0]
    assert [f for f in error.value.faults if f.startswith(key) and "is not resolved" in f]
    assert "c4n4ry" not in str(error.value)


URL = "https://me:c4n4ry@host/{0..3}.tar"


@pytest.mark.parametrize("key", ["data.train", "data.val", "data.index", "run_dir", "name"])
@pytest.mark.parametrize("url", [URL, "s3://:c4n4ry@b/x", "pipe:curl https://a:c4n4ry@b/x"])
def test_a_password_in_a_url_is_refused_without_being_said(make_config, key, url):
    with pytest.raises(ConfigError) as error:
        make_config({key: url, "num_steps": 0})
    assert "c4n4ry" not in str(error.value)
    named = [fault for fault in error.value.faults if fault.startswith(f"{key}=")]
    assert any("a password" in fault for fault in named)


def test_a_config_names_a_stream_without_secrets(make_config, squares, tmp_path, capfd):
    command = f"pipe:env TOKEN=c4n4ry cat {squares}/train-0.tar"
    changes = {"data.train": command, "data.name": "stream", "data.allow_remote": ["pipe"]}
    train.main(make_config({**changes, "num_steps": 2, "data.val": None}))
    (run,) = find_runs(tmp_path)
    assert "train-0.tar" in (run / "config.yaml").read_text()
    assert leaks(tmp_path) == [] and SECRET.decode() not in "".join(capfd.readouterr())

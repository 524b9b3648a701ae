"""Shards and configs that try to run something: nothing is executed, each is refused or ignored."""

from dataclasses import asdict

import pytest

from analysis import load_runs
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.runs.read import read_config
from lowprec.train.preflight import preflight

OVERRIDES = (
    "model={_target_: os.system, command: 'touch %s'}",
    "+x={_target_: os.system, command: 'touch %s'}",
    "optimizer.lr={_target_: os.system, command: 'touch %s'}",
    "precision.products={_target_: os.system, command: 'touch %s'}",
    'seed="!!python/object/apply:os.system [touch %s]"',
    "experiment=../../%s",
    "name=../../%s",
    "data.train='pipe:touch %s'",
    "+hydra.callbacks.x={_target_: builtins.open, file: '%s', mode: w}",
    "hydra.launcher._target_=builtins.open",
    "hydra/job_logging=default",
    "hydra.searchpath=[file://%s]",
    "hydra.sweeper.custom_search_space=os.system",
    "optimizer@hydra.run=adamw",
)


@pytest.mark.parametrize("override", OVERRIDES)
def test_override_that_would_run_something_is_refused_by_its_key(canary, override):
    override = override % canary if "%s" in override else override
    key = override.partition("=")[0].lstrip("+")
    with pytest.raises(ConfigError) as error:  # before Hydra starts
        compose_command([override], preflight=preflight)
    assert any(fault.lstrip("+").startswith(key) for fault in error.value.faults)


YAML = (
    "name: !!python/object/apply:os.system ['touch %s']",
    "a: &a [x, x, x, x, x, x, x, x, x]\nb: &b [*a, *a, *a, *a, *a]\nname: [*b, *b, *b, *b]",
    "model: {_target_: os.system, command: touch %s}",
)


@pytest.fixture(scope="module")
def trained(tiny_config, run_once, tmp_path_factory):
    """A run of one step; each test writes its config anew."""
    run = tmp_path_factory.mktemp("trained")
    run_once(tiny_config(run, {"num_steps": 1}), run)
    return run


@pytest.mark.parametrize("text", YAML)
def test_config_of_a_run_directory_is_data_to_figures_and_to_evaluation(trained, canary, text):
    (trained / "config.yaml").write_text(text % canary if "%s" in text else text)
    runs = load_runs(trained)
    assert "config.yaml is damaged" in runs.runs["note"].iloc[0] and len(runs.metrics) == 1
    with pytest.raises(ConfigError):
        read_config(trained)


def test_interpolation_in_the_config_of_a_run_is_text(tmp_path, make_config, monkeypatch):
    monkeypatch.setenv("CANARY", "a secret")
    plain = {**asdict(make_config()), "name": "${oc.env:CANARY}"}
    (tmp_path / "config.yaml").write_text(repr(plain).replace("None", "null"))
    (tmp_path / "status.json").write_text("{}")
    assert read_config(tmp_path).name == "${oc.env:CANARY}"
    assert "a secret" not in str(load_runs(tmp_path).runs.to_dict())
    with pytest.raises(ConfigError, match=r"name=\$\{oc.env:CANARY\}: .* is not resolved"):
        compose_command(["seed=1"], base=plain)

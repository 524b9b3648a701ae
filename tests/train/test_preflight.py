"""Faults that the machine makes of a config."""

import importlib.util
from dataclasses import asdict

import pytest

from experiments.benchmarks.configs import BENCHMARKS
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.config.schema import REMOVED_OPTIMIZERS, Config
from lowprec.train.preflight import preflight
from lowprec.train.run import train_run


def test_a_missing_package_is_named_with_the_command_that_installs_it(make_config, monkeypatch):
    config = make_config({"logger.name": "trackio"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="logger=trackio needs a package: pip install trackio"):
        preflight(config)


@pytest.mark.parametrize("name", REMOVED_OPTIMIZERS)
def test_a_run_with_an_optimizer_that_was_removed_is_evaluated_but_not_trained(name, make_config):
    config = make_config({"optimizer.name": name})
    preflight(config, training=False)
    fault = rf"optimizer.name={name} was removed.* optimizer=adamw"
    with pytest.raises(ConfigError, match=fault):
        train_run(config)
    for entry, schema in (("train", Config), ("benchmarks step", BENCHMARKS["step"])):
        with pytest.raises(ConfigError, match=fault):
            compose_command([], entry, schema, base=asdict(config))

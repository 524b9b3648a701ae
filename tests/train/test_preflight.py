"""Faults that the machine makes of a config."""

import importlib.machinery
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from experiments.benchmarks.configs import BENCHMARKS
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.config.schema import REMOVED_OPTIMIZERS, WARNING_ACTIONS, Config
from lowprec.runs.identity import to_dict
from lowprec.train.preflight import PACKAGES, preflight
from lowprec.train.run import train_run


@pytest.mark.parametrize("name", ["adagc", "stable_spam"])
def test_a_missing_or_old_package_is_named_with_the_command_that_installs_it(
    name, make_config, monkeypatch
):
    config = make_config({"optimizer.name": name, "diagnostics.statistics": ["grad_norm"]})
    needed, find, spec = PACKAGES[name], importlib.util.find_spec, importlib.machinery.ModuleSpec
    for installed, fault in (
        (None, "a package"),
        ("3.10.1", f"{needed}, but 3.10.1 is installed"),
        ("4.1.0", None),
        ("4.2.0rc1", None),
    ):
        own = {"pytorch_optimizer": installed and spec("pytorch_optimizer", None)}
        with monkeypatch.context() as patched:
            patched.setattr(
                importlib.util, "find_spec", lambda n, own=own: own[n] if n in own else find(n)
            )
            patched.setattr("lowprec.train.preflight.version", lambda _, v=installed: v)
            if fault is None:
                preflight(config)
                continue
            fault = f"optimizer={name} needs {fault}: pip install '{needed}'"
            with pytest.raises(ConfigError, match=re.escape(fault)):
                preflight(config)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert all(needed in project["optional-dependencies"][extra] for extra in ("dev", "peers"))


@pytest.mark.parametrize(
    "key, value",
    [
        *(("optimizer.name", name) for name in REMOVED_OPTIMIZERS),
        *(("optimizer.on_warning", {"action": action}) for action in WARNING_ACTIONS),
        ("optimizer.on_warning", {"action": "skip", "statistic": "rho", "threshold": 0.3}),
    ],
)
def test_a_run_with_what_was_removed_is_evaluated_but_not_trained(key, value, make_config):
    config = make_config({key: value})
    preflight(config, training=False)
    fault = rf"{key}.* was removed.* optimizer=(stable_)?adamw"
    with pytest.raises(ConfigError, match=fault):
        train_run(config)
    for entry, schema in (("train", Config), ("benchmarks step", BENCHMARKS["step"])):
        with pytest.raises(ConfigError, match=fault):
            compose_command([], entry, schema, base=to_dict(config))

"""Faults that the machine makes of a config."""

import importlib.util
import re
import tomllib
from functools import partial
from pathlib import Path

import pytest

from lowprec.config.check import ConfigError
from lowprec.config.schema import REMOVED_OPTIMIZERS, WARNING_ACTIONS
from lowprec.train.preflight import PACKAGES, preflight

FIND = importlib.util.find_spec


def _find(known, name):
    return known[name] if name in known else FIND(name)


@pytest.mark.parametrize(
    "name, package", [("adagc", "pytorch_optimizer"), ("stable_spam", "pytorch_optimizer")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name, package, make_config, monkeypatch
):
    config = make_config({"optimizer.name": name, "diagnostics.statistics": ["grad_norm"]})
    for is_installed in (False, True):
        find = partial(_find, {package: is_installed or None})
        monkeypatch.setattr(importlib.util, "find_spec", find)
        if is_installed:
            preflight(config)
        else:
            with pytest.raises(ConfigError, match=f"={name} needs .* pip install '{package}"):
                preflight(config)


@pytest.mark.parametrize("name", ["adagc", "stable_spam"])
def test_an_old_version_of_a_package_is_named_with_the_one_needed(name, make_config, monkeypatch):
    config = make_config({"optimizer.name": name, "diagnostics.statistics": ["grad_norm"]})
    needed = PACKAGES[name]
    for installed in ("4.1.0", "4.2.0rc1", "3.10.1"):
        monkeypatch.setattr("lowprec.train.preflight.version", lambda _, v=installed: v)
        if installed != "3.10.1":
            preflight(config)
        else:
            fault = (
                f"optimizer={name} needs {needed}, but 3.10.1 is installed: pip install '{needed}'"
            )
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
    with pytest.raises(ConfigError, match=rf"{key}.* was removed.* optimizer=(stable_)?adamw"):
        preflight(config)

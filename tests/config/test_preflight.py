"""Faults that the machine makes of a config."""

import importlib.util

import pytest

from lowprec.config.check import ConfigError
from lowprec.config.preflight import preflight

FIND = importlib.util.find_spec


@pytest.fixture
def faults(make_config, monkeypatch):
    """A function: the faults of an 8-bit optimizer with only one package installed, or none."""

    def of(name, package, device="auto", training=True):
        def find(name):
            eight_bit = name in ("bitsandbytes", "torchao")
            return (name == package or None) if eight_bit else FIND(name)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        keys = {"optimizer.name": name, "diagnostics.statistics": ["grad_norm"], "device": device}
        try:
            preflight(make_config(keys), training=training)
        except ConfigError as error:
            return error.faults
        return []

    return of


def test_a_missing_package_is_named_with_the_command_that_installs_it(faults):
    for name, package, version in (("bnb", "bitsandbytes", "<0.50"), ("torchao", "torchao", "")):
        (fault,) = faults(f"adamw8bit_{name}", None)
        assert f"optimizer=adamw8bit_{name}" in fault
        assert f"pip install '{package}{version}'" in fault
        assert not faults(f"adamw8bit_{name}", package)


def test_bitsandbytes_needs_a_gpu_to_train_and_none_to_evaluate(faults):
    (fault,) = faults("adamw8bit_bnb", "bitsandbytes", "cpu")
    assert "device=cpu" in fault and "adamw8bit_torchao" in fault
    assert not faults("adamw8bit_bnb", "bitsandbytes", "cpu", training=False)

"""Faults that the machine makes of a config."""

import importlib.util

import pytest

from lowprec.config.check import ConfigError
from lowprec.config.preflight import preflight

FIND = importlib.util.find_spec


@pytest.fixture
def faults(make_config, monkeypatch):
    """A function: the faults of a library's optimizer with one of the packages, or none."""

    def of(name, package, device="auto", training=True):
        def find(name):
            is_optional = name in ("bitsandbytes", "torchao", "pytorch_optimizer")
            return (name == package or None) if is_optional else FIND(name)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        keys = {"optimizer.name": name, "diagnostics.statistics": ["grad_norm"], "device": device}
        try:
            preflight(make_config(keys), training=training)
        except ConfigError as error:
            return error.faults
        return []

    return of


def test_a_missing_package_is_named_with_the_command_that_installs_it(faults):
    for name, package, version in (
        ("adamw8bit_bnb", "bitsandbytes", "<0.50"),
        ("adamw8bit_torchao", "torchao", ""),
        ("adagc", "pytorch_optimizer", ""),
        ("stable_spam", "pytorch_optimizer", ""),
    ):
        (fault,) = faults(name, None)
        assert f"optimizer={name}" in fault and f"pip install '{package}{version}'" in fault
        assert not faults(name, package)
    assert not faults("muon", None)


def test_bitsandbytes_needs_a_gpu_to_train_and_none_to_evaluate(faults):
    (fault,) = faults("adamw8bit_bnb", "bitsandbytes", "cpu")
    assert "device=cpu" in fault and "adamw8bit_torchao" in fault
    assert not faults("adamw8bit_bnb", "bitsandbytes", "cpu", training=False)

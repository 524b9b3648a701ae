"""The oracle for layers, as a fixture."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("oracle", Path(__file__).with_name("oracle.py"))


@pytest.fixture(scope="session")
def oracle():
    module = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(module)
    return module

"""Every function that tests/mutants.py disables exists, and so do its tests."""

import importlib
import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("mutants", Path(__file__).with_name("mutants.py"))
mutants = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("function", mutants.MUTANTS)
def test_the_function_and_its_tests_exist(function):
    module, path = function.split(":")
    target = importlib.import_module(module)
    for name in path.split("."):
        target = getattr(target, name)
    _, tests = mutants.MUTANTS[function]
    assert callable(target) and all((Path(__file__).parent / t).exists() for t in tests.split())

"""The table of mutants fits the code it breaks; `make mutants` runs them."""

import importlib.util
import shutil
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("mutants", Path(__file__).with_name("mutants.py"))
mutants = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutants)


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_changes_one_place_and_is_still_python(name, tmp_path):
    file = mutants.MUTANTS[name][0]
    (tmp_path / file).parent.mkdir(parents=True)
    shutil.copyfile(mutants.REPOSITORY / file, tmp_path / file)
    mutants.mutate(name, tmp_path)
    compile((tmp_path / file).read_text(), file, "exec")

"""The page names tests and files that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TRAIN = TESTS.parent / "lowprec" / "train"
PAGE = (TRAIN / "README.md").read_text()


def test_every_fault_names_a_test_that_exists():
    rows = [row for row in PAGE.partition("\n## Faults\n")[2].splitlines() if row[:2] == "| "][1:]
    assert len(rows) > 30
    for row in rows:
        [(path, name)] = re.findall(r"`([\w/.]+)::(\w+)` \|$", row)
        assert f"\ndef {name}(" in (TESTS / path).read_text(), (path, name)


def test_every_file_is_in_the_table_of_files():
    rows = "".join(row for row in PAGE.splitlines() if row.startswith("| `"))
    files = {path.name for path in TRAIN.glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"`(\w+\.py)`", rows))

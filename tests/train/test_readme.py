"""The page names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "lowprec" / "train" / "README.md").read_text()


def test_every_fault_names_a_test_that_exists():
    rows = [row for row in PAGE.partition("\n## Faults\n")[2].splitlines() if row[:2] == "| "][1:]
    assert len(rows) > 15
    for row in rows:
        [(path, name)] = re.findall(r"`([\w/.]+)::(\w+)` \|$", row)
        assert f"\ndef {name}(" in (TESTS / path).read_text(), (path, name)

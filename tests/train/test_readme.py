"""The table of faults names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = TESTS.parent / "lowprec" / "train" / "README.md"


def test_every_fault_names_a_test_that_exists():
    rows = [row for row in README.read_text().splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        file, names = None, re.findall(r"`([\w/.]*)::(\w+)`", row)
        assert names, row
        for path, name in names:
            file = path or file
            assert f"\ndef {name}(" in (TESTS / file).read_text(), (file, name)

"""The table of faults names tests that exist, the table of files every file there is."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
LOWPREC = TESTS.parent / "lowprec"
README = LOWPREC / "train" / "README.md"


def test_every_fault_names_a_test_that_exists():
    faults = README.read_text().partition("\n## Faults\n")[2]
    rows = [row for row in faults.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        file, names = None, re.findall(r"`([\w/.]*)::(\w+)`", row)
        assert names, row
        for path, name in names:
            file = path or file
            assert f"\ndef {name}(" in (TESTS / file).read_text(), (file, name)


def test_every_file_is_a_row_and_every_file_named_exists():
    text = README.read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", text))
    assert all((LOWPREC / "train" / n).exists() or (LOWPREC / n).exists() for n in named)
    rows = "".join(row for row in text.splitlines() if row.startswith("| `"))
    files = {path.name for path in README.parent.glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"`(\w+\.py)`", rows))

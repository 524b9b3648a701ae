"""The ledger's files: a crash while a row is written costs that row and no other."""

import pytest


@pytest.fixture
def ledger(sweeps):
    ledger = sweeps.make(2)
    row = {"event": "submitting", "token": "a", "cells": [0, 1], "launcher": {"name": "local"}}
    ledger.record(row)
    ledger.append(0, {"event": "started", "token": "a"})
    return ledger


def tear(path):
    """Leaves what a crash in the middle of a write does."""
    with open(path, "a") as file:
        file.write('{"time": 1.0, "event": "subm')


def test_rows_after_a_torn_one_are_read_and_so_are_those_before(ledger, sweeps):
    for path in (ledger.folder / "submissions.jsonl", ledger.folder / "cells" / "0000.jsonl"):
        tear(path)
    assert sweeps.names() == ["lost", "lost"]
    ledger.record({"event": "cancelled", "cells": [0]})
    ledger.append(0, {"event": "ended", "token": "a"})
    assert [row["event"] for row in ledger.events()] == ["submitting", "cancelled"]
    assert [row["event"] for row in ledger.rows(0)] == ["started", "ended"]
    assert sweeps.names() == ["cancelled", "lost"]


def test_a_submission_whose_row_is_damaged_stops_no_verb(ledger, sweeps):
    path = ledger.folder / "submissions.jsonl"
    path.write_text(path.read_text()[9:])
    ledger.record({"event": "submitted", "token": "a", "jobs": {"0": "7_0", "1": "7_1"}})
    ledger.record({"event": "cancelled", "cells": [1]})
    assert sweeps.names() == ["new", "new"]


def test_the_plan_of_a_sweep_is_its_owners_alone(ledger):
    assert (ledger.folder / "sweep.json").stat().st_mode & 0o777 == 0o600

"""The committed verdicts are those of the committed records."""

from pathlib import Path

from analysis import make

ROOT = Path(__file__).parents[2]


def test_the_committed_page_of_claims_is_what_the_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert make.main(["claims", "--runs", "experiments/results", "--out", str(tmp_path)]) == 0
    written = (tmp_path / "claims.md").read_text()
    assert (ROOT / "experiments" / "results" / "claims.md").read_text() == written

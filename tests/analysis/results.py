"""The page of results, its appendices and the claims, as texts and tables."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGE = " ".join((ROOT / "experiments" / "RESULTS.md").read_text().split())
README = " ".join((ROOT / "README.md").read_text().split())
CLAIMS = (RESULTS / "claims.md").read_text()
APPENDICES = sorted(set(RESULTS.glob("*.md")) - {RESULTS / "claims.md", RESULTS / "README.md"})


def rows_of(start):
    """The cells of each row of the one table of the appendices whose header begins with `start`."""
    [text] = [text for path in APPENDICES if f"\n{start}" in (text := path.read_text())]
    table = text[text.index(f"\n{start}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[2:]]


def claim(number, words):
    """The row of claims.md with a number whose statement begins with the words, mini first."""
    lines = CLAIMS.partition("## All rows")[2].splitlines()
    lines = [line for line in lines if line.startswith(f"| {number} | {words}")]
    [line] = [line for line in lines if ", true size |" not in line] or lines
    return line


def numbers(number, words, pattern):
    """The numbers in a row of claims.md, where the pattern's groups match."""
    return [float(text) for text in re.search(pattern, claim(number, words)).groups()]


def words_of(name):
    """The text of an appendix in one line."""
    return " ".join((RESULTS / f"{name}.md").read_text().split())

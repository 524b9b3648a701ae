"""The mark of a figure that is made of incomplete or mixed runs: one place, one look.

`make` sets it at the head of the picture and the end of the caption, whatever the figure is; what
is wrong with one run alone its own figure says beside the run's name.
"""

import textwrap
from collections.abc import Sequence

import pandas as pd

from lowprec.runs.read import ENDED

COLOR = "#A61C00"
PER_INCH = 15  # characters


def of_runs(
    drawn: pd.DataFrame,
    total: int = 0,
    absent: dict[str, list[str]] | None = None,
    other: str = "",
    lost: int = 0,
    differing: Sequence[str] = (),
) -> str:
    """What is incomplete or mixed in the drawn rows of `Runs.runs`; nothing where nothing is.

    Args:
        drawn: a row a run, of `Runs.runs`.
        total: how many runs the study asks for.
        absent: by command, those of them that are not there; see `study.missing`.
        other: the study that the runs are of, where it stands for the figure's own.
        lost: how many runs that the figure is about could not be drawn.
        differing: settings that are not the same or not the study's; see `study.differing`.
    """
    found = [f"runs of {other}"] if other else []
    ended = drawn["state"].isin(ENDED)
    rows_missing = drawn["note"].str.contains("are missing", regex=False)
    incomplete = ~ended | rows_missing
    damaged = ended & ~rows_missing & (drawn["note"] != "")
    for rows, word in ((incomplete, "incomplete"), (damaged, "damaged")):
        if rows.any():
            found.append(f"{rows.sum()} of {len(drawn)} runs {word}")
    if lost:
        found.append(f"{lost} of {len(drawn) + lost} runs not drawn")
    num_absent = sum(map(len, (absent or {}).values()))
    if num_absent:
        num = "none" if num_absent == total else f"{num_absent}"
        are = "is" if num_absent == total else "are not"
        found.append(f"{num} of the study's {total} runs {are} there")
    data = drawn["data.digest"].where(drawn["data.digest"] != "", drawn["data.train"].astype(str))
    if data.nunique() > 1:
        found.append(f"{data.nunique()} different sets of data")
    return "; ".join([*found, *differing])


def of_lines(drawn: pd.DataFrame) -> str:
    """What is mixed in the drawn lines of a benchmark."""
    found = []
    commits = drawn["commit"].nunique() if "commit" in drawn else 1
    if commits > 1:
        found.append(f"measured at {commits} commits")
    versions = drawn["versions"].map(_versions).nunique() if "versions" in drawn else 1
    if versions > 1:
        found.append(f"with {versions} sets of versions")
    return "; ".join(found)


def put(figure, mark: str) -> None:
    """Writes the mark at the head of a picture, a matplotlib Figure."""
    if mark:
        text = textwrap.fill(f"Marked: {mark}", int(PER_INCH * figure.get_figwidth()))
        figure.suptitle(text, x=0.01, ha="left", fontsize=6.5, color=COLOR)


def _versions(versions: object) -> str:
    """Versions of torch and triton, what a time depends on."""
    if not isinstance(versions, dict):
        return ""
    return f"{versions.get('torch')} {versions.get('triton')}"

"""A sweep as one page: `python -m analysis.report --runs DIR --out FILE.html`.

The page holds everything it shows and loads nothing: runs side by side by what differs in their
configs, loss and RMS_t to zoom and hover, every loss spike with a link to its moment, heat maps of
RMS_t by layer, speed and memory, and what failed, is damaged or, of a sweep, never began. It stays
below MAX_BYTES: long curves are thinned, and the page says so.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis import cli
from analysis.cli import ChoiceError
from analysis.load import NoRunsError, Runs, load_runs
from analysis.naming import name_methods
from analysis.report_cell import Budget, read_cell
from analysis.report_page import page
from analysis.report_sweep import Absent, absent_cells
from analysis.spike_marks import TENSOR

MAX_BYTES = 10_000_000
POINTS = 36_000  # of all runs, for each of the three curves of a run
MAX_POINTS = 4000  # of one run's
SPIKES = 300  # listed, of all runs
HEAT_BYTES = 900_000
UNTOLD = {  # columns that are no setting of a run
    *("run", "digest", "path", "state", "step", "reason", "note", "precision.label"),
    *("method", "variant", "name", "run_dir", "data.digest"),
}


def make_page(runs: Runs, tensor: str = TENSOR, absent: Sequence[Absent] = ()) -> str:
    """The report of some runs. `tensor`: glob of the tensors whose RMS_t is shown first.

    `absent`: cells of their sweep that have no run.
    """
    share = len(runs)
    budget = Budget(
        points=min(MAX_POINTS, max(100, POINTS // share)),
        spikes=max(2, SPIKES // share),
        heat_bytes=HEAT_BYTES // share,
    )
    heads = named(runs.summaries)
    cells = [read_cell(Runs(runs.summaries.iloc[[i]]), tensor, budget) for i in range(share)]
    return page(heads, cells, differences(heads), common(heads), tensor, budget, absent)


def named(heads: pd.DataFrame) -> pd.DataFrame:
    """Adds `method`, `variant` and `label`; a run whose config is damaged is called by its name."""
    if "precision.label" not in heads:
        heads = heads.assign(**{"precision.label": None})
    whole = heads["precision.label"].notna()
    heads = heads.assign(method=heads["run"], variant=0)
    if whole.any():
        found = name_methods(heads[whole])
        heads.loc[whole, ["method", "variant"]] = found[["method", "variant"]]
    if whole.any() and heads.loc[whole, "precision.label"].nunique() == 1:  # no need to repeat it
        known = heads.loc[whole, "method"]
        heads.loc[whole, "method"] = known.str.partition(", ")[2]
    heads["label"] = heads["method"]
    for key, form in (("model.name", "{label}, {value}"), ("seed", "{label}, seed {value:g}")):
        if key in heads and heads.loc[whole, key].nunique() > 1:
            told = [
                form.format(value=value, label=label) if known else label
                for value, label, known in zip(heads[key], heads["label"], whole, strict=True)
            ]
            heads["label"] = told
    return heads


def differences(heads: pd.DataFrame) -> list[str]:
    """The config keys that are not the same in all runs whose config is whole."""
    whole = heads[heads["precision.label"].notna()]
    keys = [key for key in whole if key not in UNTOLD | {"label"}]
    return [key for key in keys if whole[key].map(str).nunique() > 1]


def common(heads: pd.DataFrame) -> dict[str, object]:
    """The config keys that are the same in all those runs, with their values."""
    whole, differing = heads[heads["precision.label"].notna()], set(differences(heads))
    keys = [key for key in whole if key not in UNTOLD | {"label"} | differing]
    return {key: whole[key].iloc[0] for key in keys} if len(whole) else {}


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.report", description="A sweep as one page."
    )
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    parser.add_argument("--out", type=Path, required=True, help="the page, FILE.html")
    parser.add_argument("--experiment", help="only the runs of this one")
    parser.add_argument("--tensor", default=TENSOR, help=f"glob of RMS_t's tensors [{TENSOR}]")
    options = parser.parse_args(arguments)
    try:
        runs = load_runs(options.runs, experiment=options.experiment)
    except NoRunsError as error:
        absent = absent_cells(options.runs, set(), options.experiment)
        lines = [f"{cell.name}: {cell.state}: {cell.why} ({cell.where})" for cell in absent]
        raise NoRunsError("\n".join([str(error), *lines])) from error
    names = {Path(path).name for path in runs.summaries["path"]}
    absent = absent_cells(options.runs, names, options.experiment)
    text = make_page(runs, options.tensor, absent)
    if len(text.encode()) > MAX_BYTES:
        raise ChoiceError(
            f"{len(runs)} runs do not fit into {MAX_BYTES / 1e6:g} MB; choose fewer: "
            "--experiment, or a folder below"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = options.out.with_name(f".{options.out.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, options.out)
    size = len(text.encode()) / 1e6
    print(f"Wrote {options.out}: {runs!r}, {size:.1f} MB")
    return 0


if __name__ == "__main__":
    cli.run(main)

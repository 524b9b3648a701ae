"""Draws a figure from runs: `python -m analysis.make SLUG --runs DIR --out DIR [--scale SCALE]`.

A figure is drawn from the runs of the experiment of its name, of its `EXPERIMENT`, or of
`--experiment NAME`; one that names `LINES` from that benchmark's lines below DIR instead.

Writes SLUG.png, SLUG.pdf, SLUG.csv (exactly the plotted numbers) and SLUG.json (where they come
from). The same runs give the same files.
"""

import argparse
import difflib
import hashlib
import importlib
import importlib.metadata
import json
import logging
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pandas as pd

from analysis.load import NoRunsError, Runs, command, load_runs

FIGURES = Path(__file__).parent / "figures"
PACKAGES = ("lowprec", "matplotlib", "numpy", "pandas", "pyarrow")
FORMATS = ("png", "pdf")


class ChoiceError(ValueError):
    """What was asked for does not exist or is ambiguous; the message says what there is."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status: 2 for a caller's mistake."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        _check_slug(options.slug)
        figure = importlib.import_module(f"analysis.figures.{options.slug}")
        from_lines = hasattr(figure, "LINES")
        frame, origin, scale = (_of_lines if from_lines else _of_runs)(figure, options)
    except (NoRunsError, ChoiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    called = f"python -m analysis.make {shlex.join(arguments)}"
    about = {"caption": figure.caption(frame), "command": called, **origin, **_code()}
    stem = options.out / (options.slug if scale == "paper" else f"{options.slug}_{scale}")
    _write(stem, figure, frame, about)
    for line in origin["left_out"]:
        print(f"left out: {line}", file=sys.stderr)
    print(f"Wrote {stem}.png, .pdf, .csv, .json\n{about['caption']}")
    return 0


def slugs() -> list[str]:
    """The figures there are."""
    return sorted(path.stem for path in FIGURES.glob("*.py") if path.stem != "__init__")


def experiment_of(figure) -> str:
    """The experiment that makes a figure's runs: its `EXPERIMENT`, else the one of its slug."""
    return getattr(figure, "EXPERIMENT", figure.__name__.rpartition(".")[2])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.make", description="Draw a figure from runs."
    )
    parser.add_argument("slug", help=f"which figure: {', '.join(slugs())}")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of runs [runs]")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder [figures]")
    parser.add_argument("--experiment", help="draw the runs of this one in place of its own")
    parser.add_argument(
        "--scale", choices=("paper", "mini", "demo"), help="of the runs; needed if there are more"
    )
    return parser.parse_args(arguments)


def _check_slug(slug: str) -> None:
    known = slugs()
    if slug not in known:
        near = difflib.get_close_matches(slug, known, n=1, cutoff=0.4)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise ChoiceError(f"no figure {slug!r}{nearest}; there are: {', '.join(known)}")


def _choose(experiment: str, root: Path, scale: str | None) -> Runs:
    """The runs of the experiment at one scale."""
    runs = load_runs(root, experiment=experiment, scale=scale)
    scales = sorted(runs.heads["scale"].dropna().unique())
    if len(scales) > 1:
        raise ChoiceError(
            f"{root}: {experiment} was run at scales {', '.join(scales)}; "
            f"choose one: --scale {' or --scale '.join(scales)}"
        )
    if not scales:
        raise NoRunsError(
            f"{root}: every run of {experiment} has a damaged config; to make new ones: "
            f"{command(experiment, scale)}"
        )
    return runs


def _of_runs(figure, options: argparse.Namespace) -> tuple[pd.DataFrame, dict, str]:
    """The frame of a figure of runs, where it comes from, and the scale of the runs."""
    runs = _choose(options.experiment or experiment_of(figure), options.runs, options.scale)
    frame = figure.query(runs)
    drawn = runs.runs[runs.runs["run"].isin(frame["run"])]
    left_out = _left_out(runs, drawn)
    if drawn.empty:
        raise NoRunsError(f"{options.runs}: nothing to draw yet: {'; '.join(left_out)}")
    return frame, _provenance(drawn, left_out), drawn["scale"].dropna().iloc[0]


def _of_lines(figure, options: argparse.Namespace) -> tuple[pd.DataFrame, dict, str]:
    """The same of a figure of benchmark lines, which have no scale: files and their digests."""
    from analysis.bench import load_lines  # late, as it loads matplotlib

    lines = load_lines(options.runs, *figure.LINES.split())
    frame = figure.query(lines)
    drawn = sorted(set(frame["file"]) - {""})
    files = [{"path": path, "sha256": _sha256(Path(path))} for path in drawn]
    left_out = [f"{path} (a newer file has its lines)" for path in set(lines["file"]) - set(drawn)]
    return frame, {"files": files, "left_out": sorted(left_out)}, "paper"


def _left_out(runs: Runs, drawn: pd.DataFrame) -> list[str]:
    """Why runs that were found are not in the figure."""
    rest = runs.runs[~runs.runs["run"].isin(drawn["run"])]
    return [f"{run.path} ({run.note or run.state})" for run in rest.itertuples()]


def _provenance(drawn: pd.DataFrame, left_out: list[str]) -> dict:
    """The runs, their state and the digest of their metrics."""
    runs = [
        {
            "path": run.path,
            "digest": run.digest,
            "state": run.state,
            "step": int(run.step),
            "num_steps": int(run.num_steps),
            "note": run.note,
            "metrics_sha256": _sha256(Path(run.path) / "metrics.jsonl"),
        }
        for run in drawn.itertuples()
    ]
    return {"runs": runs, "left_out": left_out}


def _code() -> dict:
    """Commit and package versions of what drew."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"commit": _commit(), "versions": versions}


def _commit() -> str | None:
    """The commit of the code that drew, with `-dirty` if it was changed since; None if unknown."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, cwd=FIGURES, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _write(stem: Path, figure, frame: pd.DataFrame, about: dict) -> None:
    """Writes the four files under other names, then renames them: an old figure stays whole.

    SLUG.json, the last, holds the digests of the other three: which of them belong together.
    """
    from matplotlib.figure import Figure  # here, so that a mistyped name is answered at once

    from analysis.style import style

    temporary = {
        kind: stem.with_name(f".{stem.name}.{kind}.tmp") for kind in (*FORMATS, "csv", "json")
    }
    with style():
        canvas = Figure(layout="constrained")
        figure.draw(frame, canvas)
        for kind in FORMATS:
            dates = {"CreationDate": None} if kind == "pdf" else {}
            canvas.savefig(temporary[kind], format=kind, metadata=dates)
    frame.to_csv(temporary["csv"], index=False, lineterminator="\n")
    files = {kind: _sha256(temporary[kind]) for kind in (*FORMATS, "csv")}
    text = json.dumps({**about, "sha256": files}, indent=2, allow_nan=False)
    temporary["json"].write_text(text + "\n")
    for kind, path in temporary.items():
        path.rename(f"{stem}.{kind}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    sys.exit(main())

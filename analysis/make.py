"""Draws figures from runs: `python -m analysis.make SLUG --runs DIR --out DIR [--scale SCALE]`.

A figure is drawn from the runs of the experiment of its name or of its `EXPERIMENT`; where there
are none, from those of its `STAND_IN`; or from those of `--experiment NAME`. One that names `LINES`
is drawn from that benchmark's lines below DIR, which may be the URL of a folder.
`all` in place of SLUG draws every figure that DIR supports and says what the others lack;
`claims` judges the paper's claims by what is below one or more folders.

Writes SLUG.png, SLUG.pdf, SLUG.csv (exactly the plotted numbers) and SLUG.json (where they come
from). The same runs give the same files. Incomplete or mixed runs are marked: `analysis/marks.py`.
"""

import argparse
import contextlib
import difflib
import importlib
import json
import logging
import shlex
import sys
from pathlib import Path

import pandas as pd

from analysis import cli, marks, provenance, study
from analysis.cli import ChoiceError
from analysis.load import NoRunsError, Runs, command, load_runs

FIGURES = Path(__file__).parent / "figures"
FORMATS = ("png", "pdf")


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if arguments[:1] == ["claims"]:
        from analysis import claims  # late, as it draws nothing

        return claims.main(arguments[1:])
    options = _parse(arguments)
    called = f"python -m analysis.make {shlex.join(arguments)}"
    if options.slug == "all":
        from analysis import make_all

        return make_all.draw(options.runs, options.out, options.scale, called)
    _check_slug(options.slug)
    stem, about = draw(
        options.slug, options.runs, options.out, called, options.scale, options.experiment
    )
    for line in about["left_out"]:
        print(f"left out: {line}", file=sys.stderr)
    for line in about["missing"]:
        print(f"missing: {line}", file=sys.stderr)
    print(f"Wrote {stem}.png, .pdf, .csv, .json\n{about['caption']}")
    return 0


def draw(
    slug: str,
    root: Path | str,
    out: Path,
    called: str,
    scale: str | None = None,
    experiment: str | None = None,
) -> tuple[Path, dict]:
    """Draws one figure: the path of its files without their endings, and what SLUG.json says.

    `called`: the command to write down. Raises NoRunsError and ChoiceError.
    """
    figure = importlib.import_module(f"analysis.figures.{slug}")
    if hasattr(figure, "LINES"):
        frame, origin, scale = _of_lines(figure, root)
    else:
        frame, origin, scale = _of_runs(figure, root, experiment, scale)
    out.mkdir(parents=True, exist_ok=True)
    caption = figure.caption(frame) + (f" Marked: {origin['mark']}." if origin["mark"] else "")
    about = {"caption": caption, "command": called, **origin, **provenance.code()}
    stem = out / (slug if scale == "paper" else f"{slug}_{scale}")
    _write(stem, figure, frame, about)
    return stem, about


def slugs() -> list[str]:
    """The figures there are."""
    return sorted(path.stem for path in FIGURES.glob("*.py") if path.stem != "__init__")


def experiment_of(figure) -> str:
    """The experiment that makes a figure's runs: its `EXPERIMENT`, else the one of its slug."""
    return getattr(figure, "EXPERIMENT", figure.__name__.rpartition(".")[2])


def experiments_of(figure) -> list[str]:
    """That one, and the `STAND_IN` whose runs are drawn where it has none, if there is one."""
    return [experiment_of(figure), *([figure.STAND_IN] if hasattr(figure, "STAND_IN") else [])]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.make", description="Draw a figure from runs."
    )
    parser.add_argument("slug", help=f"all, or: {', '.join(slugs())}")
    parser.add_argument("--runs", default="runs", help="folder of runs, or its URL [runs]")
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


def _choose(experiments: list[str], root: Path | str, scale: str | None) -> tuple[str, Runs]:
    """The first of the experiments that has runs, and those at one scale."""
    experiment, *others = experiments
    try:
        runs = load_runs(root, experiment=experiment, scale=scale)
    except NoRunsError:
        with contextlib.suppress(NoRunsError):
            if others:
                return _choose(others, root, scale)
        raise
    scales = sorted(runs.summaries["scale"].dropna().unique())
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
    return experiment, runs


def _of_runs(
    figure, root: Path | str, experiment: str | None, scale: str | None
) -> tuple[pd.DataFrame, dict, str]:
    """The frame of a figure of runs, where it comes from, and the scale of the runs."""
    experiments = experiments_of(figure)
    experiment, runs = _choose([experiment] if experiment else experiments, root, scale)
    frame = figure.query(runs)
    found = runs.runs
    drawn = found[found["run"].isin(frame["run"])]
    left_out = _left_out(runs, drawn)
    if drawn.empty:
        raise NoRunsError(f"{root}: nothing to draw yet: {'; '.join(left_out)}")
    scale = drawn["scale"].dropna().iloc[0]
    about = figure.chosen(found) if hasattr(figure, "chosen") else found
    lost = len(about) - about["run"].isin(drawn["run"]).sum()
    total, absent, own = 0, {}, experiment
    if experiment in experiments:  # else the caller's choice of another study's runs
        own = experiment_of(figure)
        total, absent = study.missing(own, scale, found)
    labels = frame["label"] if "label" in frame else pd.Series("", index=frame.index)
    differing = study.differing(drawn, study.settings(own, scale), labels.dropna())
    other = experiment if absent and experiment != own else ""
    mark = marks.of_runs(drawn, total, absent, other, lost, differing)
    origin = provenance.of_runs(drawn, left_out)
    planned = sum(map(len, absent.values())) < total
    lines = [f"{', '.join(names)}: {made_by}" for made_by, names in absent.items()]
    return frame, {"mark": mark, "missing": lines if planned else [], **origin}, scale


def _of_lines(figure, root: Path | str) -> tuple[pd.DataFrame, dict, str]:
    """The same of a figure of benchmark lines, which have no scale: files and their digests."""
    from analysis.bench import load_lines  # late, as it loads matplotlib

    lines = load_lines(root, *figure.LINES.split())
    frame = figure.query(lines)
    drawn = sorted(set(frame["file"]) - {""})
    files = [{"path": path, "sha256": provenance.sha256(path)} for path in drawn]
    left_out = [f"{path} (a newer file has its lines)" for path in set(lines["file"]) - set(drawn)]
    mark = marks.of_lines(lines[lines["file"].isin(drawn)])
    origin = {"mark": mark, "missing": [], "files": files, "left_out": sorted(left_out)}
    return frame, origin, "paper"


def _left_out(runs: Runs, drawn: pd.DataFrame) -> list[str]:
    """Why runs that were found are not in the figure."""
    rest = runs.runs[~runs.runs["run"].isin(drawn["run"])]
    return [f"{run.path} ({run.note or run.state})" for run in rest.itertuples()]


def _write(stem: Path, figure, frame: pd.DataFrame, about: dict) -> None:
    """Writes the four files under other names, then renames them: an old figure stays whole.

    SLUG.json, the last, holds the digests of the other three: which of them belong together.
    """
    from matplotlib.figure import Figure  # here, so that a mistyped name is answered at once

    from analysis.style import style

    temporary = {
        kind: stem.with_name(f".{stem.name}.{kind}.tmp") for kind in (*FORMATS, "csv", "json")
    }
    try:
        with style():
            canvas = Figure(layout="constrained")
            figure.draw(frame, canvas)
            marks.put(canvas, about["mark"])
            for kind in FORMATS:
                dates = {"CreationDate": None} if kind == "pdf" else {}
                canvas.savefig(temporary[kind], format=kind, metadata=dates)
        frame.to_csv(temporary["csv"], index=False, lineterminator="\n")
        files = {kind: provenance.sha256(temporary[kind]) for kind in (*FORMATS, "csv")}
        text = json.dumps({**about, "sha256": files}, indent=2, allow_nan=False)
        temporary["json"].write_text(text + "\n")
        for kind, path in temporary.items():
            path.rename(f"{stem}.{kind}")
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    cli.run(main)

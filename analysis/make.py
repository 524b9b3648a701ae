"""Draws figures from runs: `python -m analysis.make SLUG --runs DIR --out DIR [--scale SCALE]`.

A figure shows the runs of its experiment, or those of `--experiment NAME`. A figure with `LINES`
shows that benchmark's lines. DIR may be a URL. `all` in place of SLUG draws every figure that DIR
supports; `claims` judges the paper's claims.

Writes SLUG.png, SLUG.pdf, SLUG.csv (exactly the plotted numbers) and SLUG.json (their origin). The
same runs give the same files. Figures of incomplete or mixed runs are marked: `analysis/study.py`.
"""

import argparse
import hashlib
import importlib.metadata
import json
import logging
import shlex
import sys
import textwrap
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import claims, cli, figures, study
from analysis.bench import load_lines
from analysis.cli import ChoiceError
from analysis.load import NoRunsError, Runs, as_path, command, load_runs
from analysis.style import style
from lowprec.nearest import nearest
from lowprec.runs.environment import commit

FORMATS = ("png", "pdf")
MARK_COLOR = "#A61C00"
CHARACTERS = 15  # of a mark, for each inch
PACKAGES = ("lowprec", "matplotlib", "numpy", "pandas", "pyarrow")


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if arguments[:1] == ["claims"]:
        return claims.main(arguments[1:])
    options = _parse(arguments)
    called = f"python -m analysis.make {shlex.join(arguments)}"
    if options.slug == "all":
        return draw_all(options.runs, options.out, options.scale, called)
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
    """Draws one figure; returns the path of its files without suffix, and what SLUG.json says.

    `called` is the command to record. Raises NoRunsError and ChoiceError.
    """
    figure = figures.load(slug)
    if hasattr(figure, "LINES"):
        frame, origin, scale = _of_lines(figure, root)
    else:
        frame, origin, scale = _of_runs(figure, root, experiment, scale)
    out.mkdir(parents=True, exist_ok=True)
    caption = figure.caption(frame) + (f" Marked: {origin['mark']}." if origin["mark"] else "")
    about = {"caption": caption, "command": called, **origin, **_code()}
    stem = out / (slug if scale == "paper" else f"{slug}_{scale}")
    _write(stem, figure, frame, about)
    return stem, about


def draw_all(root: Path | str, out: Path, scale: str | None, called: str) -> int:
    """Draws all figures at each scale that has runs, and writes index.md.

    Prints a line for each figure that cannot be drawn, with the command that makes its runs, and
    for each that fails, with the reason. Returns 1 if one failed, 2 if nothing was drawn.
    """
    drawn, lacking, failed = [], [], []
    summaries = _summaries(root)
    for slug in figures.slugs():
        try:
            figure = figures.load(slug)
            scales = _scales(figure, summaries, scale)
        except Exception as error:
            failed.append((slug, _in_words(error)))
            continue
        for at in scales:
            try:
                stem, about = draw(slug, root, out, called, at)
            except (NoRunsError, ChoiceError) as error:
                lacking.append((slug, _with_command(str(error), figure, at)))
                continue
            except (FileExistsError, NotADirectoryError):  # `out` is a file
                raise
            except Exception as error:  # a bug, or unusual runs
                failed.append((slug, _in_words(error)))
                continue
            drawn.append((stem.name, about))
            print(f"Wrote {stem}.png" + (f" (marked: {about['mark']})" if about["mark"] else ""))
            for line in about["missing"]:
                print(f"missing: {slug}: {line}", file=sys.stderr)
    for what, lines in (("not drawn", lacking), ("failed", failed)):
        for slug, reason in lines:
            print(f"{what}: {slug}: {reason}", file=sys.stderr)
    if drawn:
        (out / "index.md").write_text(_index(drawn, lacking + failed))
        counts = f"{len(drawn)} figures; not drawn: {len(lacking)}; failed: {len(failed)}"
        print(f"Wrote {out / 'index.md'}: {counts}")
    return 1 if failed else 0 if drawn else 2


def experiment_of(figure) -> str:
    """The experiment that makes a figure's runs: its `EXPERIMENT`, or its module's name."""
    own = getattr(figure, "EXPERIMENT", None)
    return own or figure.__name__.rpartition(".")[2]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.make", description="Draw a figure from runs."
    )
    parser.add_argument("slug", help=f"all, or: {', '.join(figures.slugs())}")
    parser.add_argument("--runs", default="runs", help="folder of runs, or its URL [runs]")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder [figures]")
    parser.add_argument("--experiment", help="draw the runs of this one in place of its own")
    parser.add_argument(
        "--scale", choices=("paper", "mini", "demo"), help="of the runs; needed if there are more"
    )
    return parser.parse_args(arguments)


def _check_slug(slug: str) -> None:
    known = figures.slugs()
    if slug not in known:
        near = nearest(slug, known)
        raise ChoiceError(f"no figure {slug!r}{near}; there are: {', '.join(known)}")


def _choose(experiment: str, root: Path | str, scale: str | None) -> Runs:
    """The runs of an experiment at one scale."""
    runs = load_runs(root, experiment=experiment, scale=scale)
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
    return runs


def _of_runs(
    figure, root: Path | str, experiment: str | None, scale: str | None
) -> tuple[pd.DataFrame, dict, str]:
    """The frame of a figure of runs, its origin, and the scale of the runs."""
    own = experiment_of(figure)
    runs = _choose(experiment or own, root, scale)
    frame = figure.query(runs)
    table = runs.runs
    drawn = table[table["run"].isin(frame["run"])]
    left_out = _left_out(runs, drawn)
    if drawn.empty:
        raise NoRunsError(f"{root}: nothing to draw yet: {'; '.join(left_out)}")
    scale = drawn["scale"].dropna().iloc[0]
    about = figure.select(table) if hasattr(figure, "select") else table
    lost = len(about) - about["run"].isin(drawn["run"]).sum()
    is_own = experiment in (None, own)  # otherwise the caller chose another study
    total, missing = study.missing(own, scale, table) if is_own else (0, [])
    mark = study.mark_of_runs(drawn, total, len(missing), lost)
    lines = [f"{', '.join(missing)}: {command(own, scale)}"] if 0 < len(missing) < total else []
    origin = _runs_drawn(drawn, left_out)
    return frame, {"mark": mark, "missing": lines, **origin}, scale


def _of_lines(figure, root: Path | str) -> tuple[pd.DataFrame, dict, str]:
    """The same for a figure of benchmark lines: files and their digests; they have no scale."""
    lines = load_lines(root, *figure.LINES.split())
    frame = figure.query(lines)
    drawn = sorted(set(frame["file"]) - {""})
    files = [{"path": path, "sha256": _sha256(path)} for path in drawn]
    left_out = [f"{path} (a newer file has its lines)" for path in set(lines["file"]) - set(drawn)]
    commits = lines.loc[lines["file"].isin(drawn)].get("commit", pd.Series(dtype=object)).nunique()
    mark = f"measured at {commits} commits" if commits > 1 else ""
    origin = {"mark": mark, "missing": [], "files": files, "left_out": sorted(left_out)}
    return frame, origin, "paper"


def _left_out(runs: Runs, drawn: pd.DataFrame) -> list[str]:
    """The runs that are not in the figure, and why."""
    rest = runs.runs[~runs.runs["run"].isin(drawn["run"])]
    return [f"{run.path} ({run.note or run.state})" for run in rest.itertuples()]


def _write(stem: Path, figure, frame: pd.DataFrame, about: dict) -> None:
    """Writes the four files under temporary names, then renames them: an old figure stays whole.

    SLUG.json, the last, holds the digests of the other three.
    """
    temporary = {
        kind: stem.with_name(f".{stem.name}.{kind}.tmp") for kind in (*FORMATS, "csv", "json")
    }
    try:
        with style():
            canvas = Figure(layout="constrained")
            figure.draw(frame, canvas)
            _put_mark(canvas, about["mark"])
            for kind in FORMATS:
                dates = {"CreationDate": None} if kind == "pdf" else {}
                canvas.savefig(temporary[kind], format=kind, metadata=dates)
        frame.to_csv(temporary["csv"], index=False, lineterminator="\n")
        files = {kind: _sha256(temporary[kind]) for kind in (*FORMATS, "csv")}
        text = json.dumps({**about, "sha256": files}, indent=2, allow_nan=False)
        temporary["json"].write_text(text + "\n")
        for kind, path in temporary.items():
            path.rename(f"{stem}.{kind}")
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _put_mark(figure: Figure, mark: str) -> None:
    """Writes the mark at the top of a picture."""
    if mark:
        text = textwrap.fill(f"Marked: {mark}", int(CHARACTERS * figure.get_figwidth()))
        figure.suptitle(text, x=0.01, ha="left", fontsize=6.5, color=MARK_COLOR)


def _summaries(root: Path | str) -> pd.DataFrame:
    """Experiment and scale of all runs; empty if there are only benchmark lines."""
    try:
        return load_runs(root).summaries[["experiment", "scale"]]
    except NoRunsError:
        return pd.DataFrame(columns=["experiment", "scale"])


def _scales(figure, summaries: pd.DataFrame, scale: str | None) -> list[str | None]:
    """The given scale, or every scale of the figure's experiment."""
    if scale is not None or hasattr(figure, "LINES"):
        return [scale]
    its = summaries[summaries["experiment"] == experiment_of(figure)]
    return sorted(its["scale"].dropna().unique()) or [None]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _with_command(reason: str, figure, scale: str | None) -> str:
    if "python -m" in reason or hasattr(figure, "LINES"):
        return reason
    return f"{reason}; to make them: {command(experiment_of(figure), scale)}"


def _index(drawn: list[tuple[str, dict]], others: list[tuple[str, str]]) -> str:
    parts = ["# Figures\n"]
    parts += [
        f"## {name}\n\n![{name}]({name}.png)\n\n{about['caption']}\n" for name, about in drawn
    ]
    if others:
        parts += ["## Not drawn\n", "\n".join(f"- `{slug}`: {why}" for slug, why in others) + "\n"]
    return "\n".join(parts)


def _runs_drawn(drawn: pd.DataFrame, left_out: list[str]) -> dict:
    """The runs with their states and the digests of their metrics."""
    runs = [
        {
            "path": run.path,
            "digest": run.digest,
            "state": run.state,
            "step": int(run.step),
            "num_steps": int(run.num_steps),
            "note": run.note,
            "metrics_sha256": _sha256(as_path(run.path) / "metrics.jsonl"),
        }
        for run in drawn.itertuples()
    ]
    return {"runs": runs, "left_out": left_out}


def _code() -> dict:
    """Commit and package versions."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"commit": commit(digits=40), "versions": versions}


def _sha256(path: Path | str) -> str:
    """Digest of a file, by its path or URL."""
    return hashlib.sha256(as_path(path).read_bytes()).hexdigest()


if __name__ == "__main__":
    cli.run(main)

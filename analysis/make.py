"""Draws figures from runs: `python -m analysis.make SLUG --runs DIR --out DIR [--scale SCALE]`.

A figure shows the runs of its studies (`analysis/grammar.py`) or those of `--experiment NAME`,
where `any` is all runs, or the lines of its benchmark. DIR may be a URL. `all` in place of SLUG
draws every figure that DIR supports, `pictures` each picture DIR/**/SLUG.png anew, and `claims`
judges the paper's claims.

Writes SLUG.png, SLUG.pdf, SLUG.csv (exactly the plotted numbers) and SLUG.json (their origin). The
same runs give the same files. Figures of incomplete or mixed runs are marked.
"""

import hashlib
import json
import logging
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from analysis import claims, cli, comparison, panels
from analysis.bench import load_lines
from analysis.cli import ChoiceError
from analysis.figures import FIGURES
from analysis.load import NoRunsError, NotMadeError, Runs, command, load_all
from analysis.run_files import NO_TENSORS, as_path
from analysis.spike_marks import protocol_of_run, why_unexamined
from analysis.style import save, style
from lowprec.config.schema import SCALES
from lowprec.nearest import nearest, some
from lowprec.runs import durable
from lowprec.runs.environment import commit, package_version
from lowprec.runs.read import ENDED
from lowprec.waiting import doing

OTHERS = "to draw runs of another experiment: --experiment NAME, or any"
SPIKES = {"height", "rms_threshold"}  # columns of figures of loss spikes
PACKAGES = ("lowprec", "matplotlib", "numpy", "pandas", "pyarrow")


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    if arguments[:1] == ["claims"]:
        return claims.main(arguments[1:])
    slugs = sorted(FIGURES)
    parser = cli.Parser(prog="python -m analysis.make", description="Draw a figure from runs.")
    parser.add_argument("slug", help=f"all, pictures, claims, or: {', '.join(slugs)}")
    parser.add_argument("--runs", default="runs", help="folder of runs, or its URL [runs]")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder [figures]")
    parser.add_argument("--experiment", help="experiment whose runs to draw; `any` for all")
    parser.add_argument("--scale", choices=SCALES, help="scale of the runs, if there are several")
    options = parser.parse_args(arguments)
    called, slug = f"python -m analysis.make {shlex.join(arguments)}", options.slug
    if slug not in (*slugs, "all", "pictures"):
        near = nearest(slug, slugs)
        raise ChoiceError(f"no figure {slug!r}{near}; there are: {some(slugs, slug)}")
    choices = load_all(options.runs), options.out, called, options.scale, options.experiment
    if slug == "all":
        return draw_all(*choices)
    if slug == "pictures":
        drawn = 0
        for path in draw_pictures(*choices[:3]):
            drawn += 1
            print(f"Wrote {path}")
        if not drawn:
            such = f"such as {slugs[0]}.png"
            raise ChoiceError(f"{options.runs}: there is no picture of a figure, {such}")
        return 0
    try:
        stem, about = draw(slug, *choices)
    except NoRunsError as error:
        raise NoRunsError(f"{error}; {OTHERS}" if not options.experiment else str(error)) from None
    if about["left_out"]:
        print(f"left out: {_by_reason(about['left_out'])}", file=sys.stderr)
    print(f"Wrote {stem}.png, .pdf, .csv, .json\n{about['caption']}")
    return 0


def draw(
    slug: str,
    runs: Runs,
    out: Path,
    called: str,
    scale: str | None = None,
    experiment: str | None = None,
) -> tuple[Path, dict]:
    """Draws one figure; returns the path of its files without suffix, and what SLUG.json says.

    `runs` are all runs of a folder, which may also hold lines. `called` is the command to record.
    Raises NoRunsError and ChoiceError.
    """
    figure = FIGURES[slug]
    doing(f"drawing {slug}")
    if figure.lines:
        frame, origin, scale = _of_lines(figure, runs.root)
    else:
        frame, origin, scale = _of_runs(figure, runs, experiment, scale)
    out.mkdir(parents=True, exist_ok=True)
    mark = f" Marked: {origin['mark']}." if origin["mark"] else ""
    caption = figure.caption(frame) + mark
    code = {"commit": commit(digits=40), "versions": {p: package_version(p) for p in PACKAGES}}
    about = {"caption": caption, "command": called, **origin, **code}
    stem = out / (slug if scale == "paper" else f"{slug}_{scale}")
    with style():
        canvas = Figure(layout="constrained")
        figure.draw(frame, canvas)
        panels.wrap_titles(canvas)
        panels.add_title(canvas, figure.heading(frame), origin["mark"])
        save(canvas, stem, frame)
    text = json.dumps(about, indent=2, allow_nan=False)
    durable.replace(Path(f"{stem}.json"), f"{text}\n".encode())
    return stem, about


def draw_all(
    runs: Runs, out: Path, called: str, scale: str | None = None, experiment: str | None = None
) -> int:
    """Draws all figures at each scale that has runs.

    Prints a line for each figure that cannot be drawn from its runs or fails, with the reason, and
    one line for all figures without runs, or of other studies than `experiment`. Returns 1 if one
    failed, 2 if nothing was drawn. Raises NoRunsError if there are no such runs and no lines.
    """
    drawn, failed, missing, explained = {}, [], [], []
    for slug, at in _slugs_and_scales(runs.summaries, scale, experiment):
        try:
            stem, about = draw(slug, runs, out, called, at, experiment)
        except (NoRunsError, ChoiceError) as error:
            is_other = experiment not in (None, *FIGURES[slug].studies)
            if is_other or isinstance(error, NotMadeError):
                missing.append(slug)
            else:
                explained.append(slug)
                print(f"not drawn: {slug}: {error}", file=sys.stderr)
        except (FileExistsError, NotADirectoryError):  # `out` is a file
            raise
        except Exception as error:  # a bug, or unusual runs
            failed.append(slug)
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(f"failed: {slug}: {text}", file=sys.stderr)
        else:
            drawn[slug] = stem
            print(f"Wrote {stem}.png" + (f" (marked: {about['mark']})" if about["mark"] else ""))
    if not (drawn or failed or explained):
        runs.select(None if experiment == "any" else experiment, scale)
    if missing := [slug for slug in dict.fromkeys(missing) if slug not in drawn]:
        names = _some(missing)
        print(f"not drawn: {names} (to see why, name one in place of all)", file=sys.stderr)
    if not drawn and experiment is None:
        print(OTHERS, file=sys.stderr)
    return 1 if failed else 0 if drawn else 2


def draw_pictures(runs: Runs, out: Path, called: str) -> Iterator[Path]:
    """Draws each picture SLUG.png below the root of records anew, at the same place below `out`.

    It shows the runs of its folder, or with `same_but` all runs of the records at their scale.
    Other pictures are left alone. Raises ChoiceError for a URL or an archive.
    """
    root = as_path(runs.root)
    if not isinstance(root, Path):
        raise ChoiceError(f"--runs {runs.root}: pictures need a folder, not a URL or an archive")
    for path in sorted(root.rglob("*.png")):
        if path.stem not in FIGURES:
            continue
        figure, place = FIGURES[path.stem], out / path.relative_to(root)
        own = runs.where(runs.summaries["path"].str.startswith(f"{path.parent}/"))
        is_its = figure.lines or set(own.summaries["experiment"]) & set(figure.studies)
        scale = next(iter(own.summaries["scale"].dropna()), None)
        drawn = runs if figure.lines or figure.same_but else own
        with tempfile.TemporaryDirectory() as folder:
            choices = Path(folder), called, scale, None if is_its else "any"
            stem, _ = draw(path.stem, drawn, *choices)
            place.parent.mkdir(parents=True, exist_ok=True)
            durable.replace(place, Path(f"{stem}.png").read_bytes())
        yield place


def _of_runs(
    figure, everything: Runs, experiment: str | None, scale: str | None
) -> tuple[pd.DataFrame, dict, str]:
    """The frame of a figure of runs, its origin, and the scale of the runs."""
    root = everything.root
    name = experiment or figure.source(everything.summaries, scale)
    runs = everything.select(None if name == "any" else name, scale)
    scales = sorted(runs.summaries["scale"].dropna().unique())
    if len(scales) > 1:
        raise ChoiceError(
            f"{root}: {name} was run at scales {', '.join(scales)}; "
            f"choose one: --scale {' or --scale '.join(scales)}"
        )
    if experiment is None and figure.same_but:
        studies, at = (everything.summaries[key] for key in ("experiment", "scale"))
        runs = everything.where(studies.isin(figure.studies) & (at.isin(scales) | at.isna()))
    to_make = f"to make runs: {command(figure.studies[0] if name == 'any' else name, scale)}"
    try:
        frame = figure.query(runs)
    except NoRunsError as error:
        raise NoRunsError(f"{error}; {to_make}") from None
    table = runs.runs
    is_drawn = table["run"].isin(frame["run"])
    drawn = table[is_drawn]
    selected = figure.select(table)
    lacking = f"it lacks what is drawn: {figure.words(frame).rstrip(',')}"
    reasons = _why_left_out(table[~is_drawn], drawn, set(selected["run"]), lacking)
    left_out = dict(zip(table["path"][~is_drawn], reasons, strict=True))
    if drawn.empty:
        raise NoRunsError(f"{root}: nothing to draw yet: {_by_reason(left_out)}; {to_make}")
    lost = (~selected["run"].isin(drawn["run"])).sum()
    mark = mark_of_runs(drawn, lost, has_spikes=not SPIKES.isdisjoint(frame))
    columns = ["path", "digest", "state", "step", "num_steps", "note"]
    rows = json.loads(drawn[columns].to_json(orient="records"))
    for row in rows:
        row["metrics_sha256"] = _sha256(as_path(row["path"]) / "metrics.jsonl")
    return frame, {"mark": mark, "runs": rows, "left_out": left_out}, scales[0]


def mark_of_runs(drawn: pd.DataFrame, num_lost: int = 0, has_spikes: bool = False) -> str:
    """What is incomplete or mixed in a figure, in words; "" if nothing is.

    `drawn`: the drawn rows of `Runs.runs`; `num_lost` runs could not be drawn. `has_spikes`: the
    figure shows loss spikes, which runs may be too short for.
    """
    incomplete = (~drawn["state"].isin(ENDED) | ~drawn["note"].isin(["", NO_TENSORS])).sum()
    data = drawn["data.digest"].where(drawn["data.digest"] != "", drawn["data.train"].astype(str))
    num_data = data.nunique()
    if drawn["data.train"].nunique() == 1:  # an evaluation reads more, which changes the digest
        reads = drawn["evaluation.name"].replace("both", "zero_shot")
        num_data = data.groupby(reads, dropna=False).nunique().max()
    short = [
        why_unexamined(head["step"], protocol_of_run(head)) != ""
        for head in drawn.to_dict("records")
        if has_spikes
    ]
    texts = {
        f"{incomplete} of {len(drawn)} runs incomplete or damaged": incomplete,
        f"{num_lost} of {len(drawn) + num_lost} runs not drawn": num_lost,
        f"{num_data} different data sets": num_data > 1,
        f"{sum(short)} of {len(drawn)} runs too short for loss spikes": sum(short),
    }
    return "; ".join(text for text, holds in texts.items() if holds)


def _of_lines(figure, root: Path | str) -> tuple[pd.DataFrame, dict, str]:
    """The same for a figure of benchmark lines: files and their digests; they have no scale."""
    frame = figure.query(load_lines(root, figure.lines))
    paths = sorted(set(frame["file"].dropna()) - {""})
    files = [{"path": path, "sha256": _sha256(as_path(path))} for path in paths]
    return frame, {"mark": "", "files": files, "left_out": frame.attrs.get("left_out", {})}, "paper"


def _why_left_out(
    rest: pd.DataFrame, drawn: pd.DataFrame, selected: set[str], lacking: str
) -> list[str]:
    """Why each run of `rest` is not drawn.

    It is damaged, it is one of the `selected` but `lacking` what is drawn, or it is not selected:
    then its first setting that no drawn run has.
    """
    keys = [*comparison.columns(rest), "seed"]
    shown = {key: set(drawn[key].map(comparison.written)) for key in keys}
    reasons = []
    for head in rest.to_dict("records"):
        texts = {key: comparison.written(head[key]) for key in keys}
        other = next((f"{key}={text}" for key, text in texts.items() if text not in shown[key]), "")
        if head["note"] not in ("", NO_TENSORS):
            reasons.append(head["note"])
        elif head["run"] in selected:
            reasons.append(head["note"] if drawn.empty and head["note"] else lacking)
        elif len(drawn) and other:
            reasons.append(f"no run with {other} is drawn")
        else:
            reasons.append("the figure is about other runs")
    return reasons


def _by_reason(left_out: dict[str, str]) -> str:
    """`PATH (REASON) and 2 more`, for the first reasons why something is left out."""
    first, num = {}, Counter(left_out.values())
    for name, reason in left_out.items():
        first.setdefault(reason, f"{name} ({reason})" + _more(num[reason] - 1))
    shown = list(first)[:3]
    return "; ".join(first[reason] for reason in shown) + (
        _more(len(left_out) - sum(num[reason] for reason in shown), "; and {} for other reasons")
    )


def _some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:3]) + _more(len(names) - 3)


def _more(count: int, words: str = " and {} more") -> str:
    return words.format(count) if count > 0 else ""


def _slugs_and_scales(
    summaries: pd.DataFrame, scale: str | None, experiment: str | None
) -> list[tuple[str, str | None]]:
    """Each figure with the given scale, or with every scale of the runs that it can show."""
    pairs = []
    for slug in sorted(FIGURES):
        figure = FIGURES[slug]
        names = [experiment] if experiment and not figure.lines else figure.sources
        is_own = summaries["experiment"].isin(names) | ("any" in names)
        scales = summaries.loc[is_own, "scale"].dropna().unique()
        pairs += [(slug, at) for at in ([scale] if scale else sorted(scales) or [None])]
    return pairs


def _sha256(path: Path) -> str:
    """Digest of a file, perhaps behind a URL or in an archive."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    cli.run(main)

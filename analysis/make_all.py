"""Every figure that some runs support, and what the others lack: `python -m analysis.make all`."""

import importlib
import sys
from pathlib import Path

import pandas as pd

from analysis import make
from analysis.cli import ChoiceError
from analysis.load import NoRunsError, command, load_runs


def draw(root: Path | str, out: Path, scale: str | None, called: str) -> int:
    """Draws all figures at each scale there is, and index.md.

    A figure that cannot be drawn is a line of its own with the command that makes its runs; one
    that fails is a line with the reason, and no other is drawn less. Returns 1 where one failed,
    2 where nothing was drawn.
    """
    drawn, lacking, failed = [], [], []
    heads = _heads(root)
    for slug in make.slugs():
        try:
            figure = importlib.import_module(f"analysis.figures.{slug}")
            scales = _scales(figure, heads, scale)
        except Exception as error:
            failed.append((slug, _in_words(error)))
            continue
        for at in scales:
            try:
                stem, about = make.draw(slug, root, out, called, at)
            except (NoRunsError, ChoiceError) as error:
                lacking.append((slug, _with_command(str(error), figure, at)))
                continue
            except (FileExistsError, NotADirectoryError):  # in the place of `out`
                raise
            except Exception as error:  # a bug, or runs that the figure cannot bear
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


def _heads(root: Path | str) -> pd.DataFrame:
    """Experiment and scale of the runs there are; no rows where there are only lines."""
    try:
        return load_runs(root).summaries[["experiment", "scale"]]
    except NoRunsError:
        return pd.DataFrame(columns=["experiment", "scale"])


def _scales(figure, heads: pd.DataFrame, scale: str | None) -> list[str | None]:
    """The scales to draw a figure at: those that its experiments were run at, if none is given."""
    if scale is not None or hasattr(figure, "LINES"):
        return [scale]
    its = heads[heads["experiment"].isin(make.experiments_of(figure))]
    return sorted(its["scale"].dropna().unique()) or [None]


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _with_command(reason: str, figure, scale: str | None) -> str:
    if "python -m" in reason or hasattr(figure, "LINES"):
        return reason
    return f"{reason}; to make them: {command(make.experiment_of(figure), scale)}"


def _index(drawn: list[tuple[str, dict]], others: list[tuple[str, str]]) -> str:
    parts = ["# Figures\n"]
    parts += [
        f"## {name}\n\n![{name}]({name}.png)\n\n{about['caption']}\n" for name, about in drawn
    ]
    if others:
        parts += ["## Not drawn\n", "\n".join(f"- `{slug}`: {why}" for slug, why in others) + "\n"]
    return "\n".join(parts)

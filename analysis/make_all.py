"""Every figure that some runs support, and what the others lack: `python -m analysis.make all`."""

import importlib
import sys
from pathlib import Path

from analysis import make
from analysis.load import NoRunsError, command, load_runs


def draw(root: Path, out: Path, scale: str | None, called: str) -> int:
    """Draws all figures at each scale there is, and index.md; 2 where nothing was drawn.

    A figure that cannot be drawn is a line of its own with the command that makes its runs.
    """
    drawn, lacking = [], []
    for slug in make.slugs():
        figure = importlib.import_module(f"analysis.figures.{slug}")
        for at in _scales(figure, root, scale):
            try:
                stem, about = make.draw(slug, root, out, called, at)
            except (NoRunsError, make.ChoiceError) as error:
                lacking.append((slug, _with_command(str(error), figure, at)))
                continue
            drawn.append((stem.name, about))
            print(f"Wrote {stem}.png" + (f" (marked: {about['mark']})" if about["mark"] else ""))
            for line in about["missing"]:
                print(f"missing: {slug}: {line}", file=sys.stderr)
    for slug, reason in lacking:
        print(f"not drawn: {slug}: {reason}", file=sys.stderr)
    if not drawn:
        return 2
    (out / "index.md").write_text(_index(drawn, lacking))
    print(f"Wrote {out / 'index.md'}: {len(drawn)} figures; not drawn: {len(lacking)}")
    return 0


def _scales(figure, root: Path, scale: str | None) -> list[str | None]:
    """The scales to draw a figure at: those that its experiment was run at, if none is given."""
    if scale is not None or hasattr(figure, "LINES"):
        return [scale]
    try:
        heads = load_runs(root, experiment=make.experiment_of(figure)).heads
    except NoRunsError:
        return [None]
    return sorted(heads["scale"].dropna().unique()) or [None]


def _with_command(reason: str, figure, scale: str | None) -> str:
    if "python -m" in reason or hasattr(figure, "LINES"):
        return reason
    return f"{reason}; to make them: {command(make.experiment_of(figure), scale)}"


def _index(drawn: list[tuple[str, dict]], lacking: list[tuple[str, str]]) -> str:
    parts = ["# Figures\n"]
    parts += [
        f"## {name}\n\n![{name}]({name}.png)\n\n{about['caption']}\n" for name, about in drawn
    ]
    if lacking:
        parts += ["## Not drawn\n", "\n".join(f"- `{slug}`: {why}" for slug, why in lacking) + "\n"]
    return "\n".join(parts)

"""A folder of runs as one page: `python -m analysis.report --runs DIR --out FILE.html`.

The page is self-contained and loads nothing. It lists runs by the settings that differ and shows
curves of loss and RMS_t, every loss spike, and the runs that failed or are damaged. Long curves are
thinned to bound the size of the page. With `--watch SECONDS`, the page is written again every
SECONDS until no run goes on, and a browser reloads it.
"""

import contextlib
import time
from pathlib import Path

from analysis import cli
from analysis.cli import ChoiceError
from analysis.comparison import counted
from analysis.load import load_runs
from analysis.report.page import make_page
from analysis.spike_marks import TENSOR
from lowprec.runs import durable
from lowprec.runs.read import ENDED, RecordFileError
from lowprec.sweep.plan import Plan
from lowprec.waiting import doing


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    about = "Writes one page about a folder of runs."
    parser = cli.Parser(prog="python -m analysis.report", description=about)
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    parser.add_argument("--out", type=Path, required=True, help="the page, FILE.html")
    parser.add_argument("--tensor", default=TENSOR, help=f"glob of tensors for RMS_t [{TENSOR}]")
    parser.add_argument("--watch", type=int, metavar="SECONDS", help="write it again and again")
    options = parser.parse_args(arguments)
    if options.out.is_dir():
        raise ChoiceError(f"--out {options.out}: this is a folder; FILE.html is expected")
    if options.watch is not None and options.watch < 1:
        raise ChoiceError(f"--watch {options.watch}: a whole number of seconds >= 1 is expected")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    while True:
        runs = load_runs(options.runs)
        if options.tensor != TENSOR and not options.watch:
            try:
                runs.tensors(options.tensor)
            except LookupError as error:
                raise ChoiceError(f"--tensor {options.tensor}: {error}") from None
        goes_on = planned_runs(Path(options.runs))
        states = dict(zip(*(runs.summaries[key] for key in ("run", "state")), strict=True))
        planned = [name for name in goes_on if goes_on[name] and name not in states]
        goes_on |= {name: False for name in states if states[name] in (*ENDED, "failed")}
        has_ended = not planned and not any(goes_on.get(name, True) for name in states)
        refresh = 0 if has_ended else options.watch or 0
        doing(f"writing the page about {counted(len(runs), 'run')}")
        text = make_page(runs, options.tensor, refresh, planned)
        durable.replace(options.out, text.encode())  # a browser never loads half a page
        more = f" and {len(planned)} not begun" if planned else ""
        print(f"Wrote {options.out}: {runs!r}{more}, {len(text) / 1e6:.1f} MB")
        if not refresh:
            return 0
        doing(None)
        try:
            time.sleep(refresh)
        except KeyboardInterrupt:
            return 0


def planned_runs(folder: Path) -> dict[str, bool]:
    """The runs of a folder that were submitted, and whether each goes on by itself.

    Runs that are cancelled, lost or failed do not, once their training has ended. A sweep may have
    another name than the folder: that of its experiment's file.
    """
    runs: dict[str, bool] = {}
    for path in (folder.parent / "sweeps").glob("*/sweep.json"):
        with contextlib.suppress(OSError, RecordFileError):
            plan = Plan(path.parent)
            runs |= {
                Path(run.directory).name: plan.is_training(run.index) or not plan.is_over(run.index)
                for run in plan.runs
                if Path(run.directory).parent.name == folder.name
            }
    return runs


if __name__ == "__main__":
    cli.run(main)

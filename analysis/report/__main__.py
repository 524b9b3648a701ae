"""A folder of runs as one page: `python -m analysis.report --runs DIR --out FILE.html`.

The page is self-contained and loads nothing. It compares runs by the settings that differ and shows
curves of loss and RMS_t, every loss spike, heat maps of RMS_t by layer, and the runs that failed or
are damaged. Long curves are thinned to bound the size of the page. With `--watch SECONDS`, the page
is written again every SECONDS until all runs have ended or failed, and a browser reloads it.
"""

import os
import time
from pathlib import Path

from analysis import cli
from analysis.cli import ChoiceError
from analysis.load import Runs, load_runs
from analysis.report.page import make_page
from analysis.spike_marks import TENSOR
from lowprec.runs.read import ENDED


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = cli.Parser(
        prog="python -m analysis.report", description="Writes one page about a folder of runs."
    )
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    parser.add_argument("--out", type=Path, required=True, help="the page, FILE.html")
    parser.add_argument("--experiment", help="only the runs of this experiment")
    parser.add_argument("--tensor", default=TENSOR, help=f"glob of tensors for RMS_t [{TENSOR}]")
    parser.add_argument("--watch", type=int, metavar="SECONDS", help="write it again and again")
    options = parser.parse_args(arguments)
    if options.out.is_dir():
        raise ChoiceError(f"--out {options.out}: this is a folder; FILE.html is expected")
    if options.watch is not None and options.watch < 1:
        raise ChoiceError(f"--watch {options.watch}: a whole number of seconds >= 1 is expected")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    while True:
        runs = load_runs(options.runs, experiment=options.experiment)
        if options.tensor != TENSOR and not options.watch:
            _check_tensor(runs, options.tensor)
        goes_on = bool(options.watch) and (~runs.summaries["state"].isin([*ENDED, "failed"])).any()
        _write(runs, options.tensor, options.out, options.watch if goes_on else 0)
        if not goes_on:
            return 0
        try:
            time.sleep(options.watch)
        except KeyboardInterrupt:
            return 0


def _check_tensor(runs: Runs, tensor: str) -> None:
    try:
        runs.tensors(tensor)
    except LookupError as error:
        raise ChoiceError(f"--tensor {tensor}: {error}") from None


def _write(runs: Runs, tensor: str, out: Path, refresh: int) -> None:
    text = make_page(runs, tensor, refresh).encode()
    temporary = out.with_name(f".{out.name}.tmp")
    temporary.write_bytes(text)
    os.replace(temporary, out)  # a browser never loads half a page
    print(f"Wrote {out}: {runs!r}, {len(text) / 1e6:.1f} MB")


if __name__ == "__main__":
    cli.run(main)

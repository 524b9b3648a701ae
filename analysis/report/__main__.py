"""A folder of runs as one page: `python -m analysis.report --runs DIR --out FILE.html`.

The page is self-contained and loads nothing. It compares runs by the settings that differ and shows
curves of loss and RMS_t, every loss spike, heat maps of RMS_t by layer, and the runs that failed or
are damaged. Long curves are thinned to bound the size of the page.
"""

from pathlib import Path

from analysis import cli
from analysis.cli import ChoiceError
from analysis.load import load_runs
from analysis.report.page import make_page
from analysis.spike_marks import TENSOR


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = cli.Parser(
        prog="python -m analysis.report", description="Writes one page about a folder of runs."
    )
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    parser.add_argument("--out", type=Path, required=True, help="the page, FILE.html")
    parser.add_argument("--tensor", default=TENSOR, help=f"glob of tensors for RMS_t [{TENSOR}]")
    options = parser.parse_args(arguments)
    if options.out.is_dir():
        raise ChoiceError(f"--out {options.out}: this is a folder; FILE.html is expected")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    runs = load_runs(options.runs)
    if options.tensor != TENSOR:
        try:
            runs.tensors(options.tensor)
        except LookupError as error:
            raise ChoiceError(f"--tensor {options.tensor}: {error}") from None
    text = make_page(runs, options.tensor)
    options.out.write_text(text, "utf-8")
    print(f"Wrote {options.out}: {runs!r}, {len(text) / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    cli.run(main)

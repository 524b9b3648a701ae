"""The paper's claims beside our runs: `python -m analysis.make claims --runs DIR ... --out DIR`.

Writes claims.md and claims.html: of each claim the paper's number, ours with a 95% interval over
seeds, the margin within which they count as equal and whose it is, and a verdict. All numbers of
ours are computed from the runs and benchmark lines below the folders, at the largest scale that has
runs.
"""

import argparse
import html
import re
from pathlib import Path

from analysis import claims_layers, claims_precision, claims_scaler, claims_stability
from analysis.evidence import Evidence
from analysis.load import NoRunsError, as_path
from analysis.verdicts import NO_RUNS, NOT, OUT, REPRODUCED, UNDECIDED, Claim, Finding

ROOMS = (claims_precision, claims_layers, claims_stability, claims_scaler)
CLAIMS = tuple(claim for room in ROOMS for claim in room.CLAIMS)
HEADER = ("", "claim", "the paper's", "ours", "margin", "verdict")
NOTE = (
    "The paper: arXiv:2304.13013. Intervals: 95%, over seeds (t) or of a share (Wilson). "
    f"{OUT.capitalize()}: our runs are too small to decide, whatever they show. "
    f"{UNDECIDED.capitalize()}: the evidence allows either, or is of one seed. Spikes are those of "
    "each run's own thresholds. Rows of benchmarks (C6 to C8) have no interval: their numbers are "
    "one measurement each."
)
COLORS = {REPRODUCED: "#d8efe0", NOT: "#f8dcd6", UNDECIDED: "#fdf1cf", OUT: "#ececec", NO_RUNS: ""}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1200px; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .45rem .6rem;
         border-bottom: 1px solid #ddd; }
td:first-child { font-weight: 600; }
code { font-size: .85em; overflow-wrap: anywhere; }
"""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.make claims", description="Judge the paper's claims."
    )
    parser.add_argument("--runs", nargs="+", default=["runs"],
                        help="folders of runs and lines, or their URLs [runs]")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder [figures]")
    options = parser.parse_args(arguments)
    absent = [root for root in options.runs if not as_path(root).is_dir()]
    if absent:
        parser.error(f"no folder {', '.join(absent)}")
    evidence = Evidence(options.runs)
    rows = [(claim, judge(claim, evidence)) for claim in CLAIMS]
    options.out.mkdir(parents=True, exist_ok=True)
    sources = f"{len(evidence)} runs and the benchmark lines below {', '.join(options.runs)}."
    for kind, text in (("md", markdown(rows, sources)), ("html", page(rows, sources))):
        (options.out / f"claims.{kind}").write_text(text)
    for claim, found in rows:
        print(f"{claim.number:4}{found.verdict:32}{claim.text}")
    print(f"Wrote {options.out}/claims.md, .html")
    return 0


def judge(claim: Claim, evidence: Evidence) -> Finding:
    """The claim's finding; without evidence what is missing, such as the command that makes it."""
    try:
        return claim.judge(evidence)
    except NoRunsError as error:
        return Finding("", NO_RUNS, str(error))


def markdown(rows: list[tuple[Claim, Finding]], sources: str) -> str:
    """The table as Markdown."""
    lines = ["# Claims", "", f"From {sources} {NOTE}", "", f"| {' | '.join(HEADER)} |"]
    lines.append("|" + "---|" * len(HEADER))
    for claim, found in rows:
        why = f" ({_command(found.why, '`{}`')})" if found.why else ""
        cells = (claim.number, claim.text, claim.paper, found.ours, claim.bound,
                 f"**{found.verdict}**{why}")  # fmt: skip
        lines.append(f"| {' | '.join(cell.replace('|', '/') or '-' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def page(rows: list[tuple[Claim, Finding]], sources: str) -> str:
    """The table as a page of its own, that loads nothing."""
    body = ["<tr>" + "".join(f"<th>{name}</th>" for name in HEADER) + "</tr>"]
    for claim, found in rows:
        cells = [claim.number, claim.text, claim.paper, found.ours or "-", claim.bound]
        row = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        color = COLORS[next(name for name in (NOT, *COLORS) if found.verdict.startswith(name))]
        why = _command(html.escape(found.why), "<code>{}</code>")
        verdict = f"<b>{html.escape(found.verdict)}</b>" + (f"<br>{why}" if why else "")
        body.append(f"<tr>{row}<td style='background:{color}'>{verdict}</td></tr>")
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>Claims</title>"
        f"<style>{STYLE}</style></head><body><h1>Claims</h1>"
        f"<p>From {html.escape(sources)} {html.escape(NOTE)}</p><table>\n"
        + "\n".join(body)
        + "\n</table></body></html>\n"
    )


def _command(why: str, code: str) -> str:
    return re.sub(r"python -m \S+( -m \S+)?( \S+=\S+)*", lambda found: code.format(found[0]), why)

"""The spikes of runs: `python -m analysis.spikes --run DIR [--tensor PATTERN] [--out DIR]`.

Prints each loss spike with its onset and the RMS spikes before it, how often loss spikes follow RMS
spikes for each tensor and by chance, and how this depends on the thresholds. --out writes the
tables as CSV and a picture of each loss spike. `lowprec/diagnostics/README.md` has the definitions.
"""

import argparse
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import cli, paper
from analysis.cli import ChoiceError
from analysis.figures import rms_and_loss
from analysis.load import Runs, load_runs
from analysis.spike_marks import (
    FRACTIONS,
    TENSOR,
    THRESHOLDS,
    Series,
    count_following,
    lead_table,
    protocol_of_run,
    read_series,
    sensitivity_table,
    spike_table,
)
from analysis.style import COLUMN_WIDTH, style
from lowprec.diagnostics.spikes import PROTOCOLS, Protocol, largest_rms, relative_rms, rms_spikes

LOCAL_SHIFT = 1000  # steps over which the phase of training stays about the same
AROUND = 60  # steps drawn on either side of a spike
NUM_CONTROLS = 10  # other tensors printed


def describe(series: Series, protocol: Protocol, tensor: str) -> tuple[str, dict]:
    """Text about the spikes of one run, and the tables behind it by name."""
    num_steps, ignored = len(series.loss), protocol.ignore_steps
    if num_steps <= ignored:
        text = f"{num_steps:,} steps are recorded, and the first {ignored:,} are ignored: nothing "
        return text + "to look at yet. --ignore-steps N ignores fewer.", {}
    spikes = spike_table(series, protocol, tensor)
    tables = {"spikes": spikes, "sensitivity": sensitivity_table(series, protocol, tensor)}
    lines = _summary_lines(series, protocol, tensor, len(spikes))
    if len(spikes):
        printed = spikes.assign(tensors=spikes["tensors"].map(_first_name))
        lines += ["", _text(printed), "", *_lead_lines(series, protocol, tensor, spikes)]
        tables["tensors"] = lead_table(series, protocol)
        printed, others = tables["tensors"].iloc[:NUM_CONTROLS], tables["tensors"][NUM_CONTROLS:]
        lines += ["", "By tensor, the most followed first (each p is for one tensor alone):"]
        lines.append(_text(printed) if len(printed) else "RMS_t is not recorded for any tensor.")
        if len(others):
            lines.append(f"and {len(others)} more, median share {others['share'].median():.1%}")
    if tables["sensitivity"]["num_loss_spikes"].any():
        by_threshold = _text(tables["sensitivity"])
        lines += ["", "By threshold, one changed at a time (* as above):", by_threshold]
    else:
        lines.append("Other thresholds find no loss spikes either.")
    return "\n".join(lines), tables


def _summary_lines(series: Series, protocol: Protocol, tensor: str, num_spikes: int) -> list[str]:
    rms = series.rms_of(tensor)
    matching = sum(fnmatchcase(name, tensor) for name in series.rms)
    where = tensor if matching < 2 else f"the largest of {matching} tensors {tensor}"
    counts = f"{int(rms_spikes(rms, protocol).sum())} RMS spikes ({where})"
    if not series.reaches(protocol):
        beta2, largest = series.beta2.max(), largest_rms(series.beta2.max())
        counts = (
            f"no possible RMS spikes ({where}): at beta2 = {beta2:g}, RMS_t cannot exceed "
            f"{largest:.2f}, and the threshold is {protocol.rms_threshold:g}"
        )
    lines = [f"{num_spikes} loss spikes and {counts} in {len(rms):,} steps."]
    late = rms[protocol.ignore_steps :]
    if np.isnan(late).all():
        return [*lines, "RMS_t is not recorded there."]
    rho = relative_rms(rms, series.beta2)[protocol.ignore_steps :]
    step = int(np.nanargmax(late)) + protocol.ignore_steps + 1
    lines.append(f"Largest RMS_t: {np.nanmax(late):.3g} at step {step}; ")
    lines[-1] += f"largest rho = RMS_t sqrt(1 - beta2): {np.fmax.reduce(rho):.3g} (at most 1)."
    return lines


def _lead_lines(series: Series, protocol: Protocol, tensor: str, spikes: pd.DataFrame) -> list[str]:
    rms = series.rms_of(tensor)
    counts = count_following(series, rms, protocol)
    near = count_following(series, rms, protocol, LOCAL_SHIFT)
    num_onsets = spikes["onset"].nunique()
    return [
        f"{counts['num_following']} of {len(spikes)} loss spikes ({counts['share']:.0%}) come 1 "
        f"to {protocol.max_lead} steps after an RMS spike; counted from the onset, "
        f"{counts['num_by_onset']} of {num_onsets}.",
        f"By chance {counts['chance']:.1%} (95%: {counts['low']:.0%} to {counts['high']:.0%}), "
        f"p = {counts['p_value']:.2g} (onset: {counts['p_by_onset']:.2g}), shifting the RMS spikes "
        f"over the run; {near['chance']:.1%} (95%: {near['low']:.0%} to {near['high']:.0%}), "
        f"p = {near['p_value']:.2g} (onset: {near['p_by_onset']:.2g}), by at most "
        f"{LOCAL_SHIFT:,} steps.",
        f"Spikes by lead in steps: {_histogram(spikes['lead'], protocol)}.",
        f"Spikes by lead to the onset: {_histogram(spikes['onset_lead'], protocol)}.",
        f"The paper: {paper.FOLLOWING_SAID}.",
    ]


def _histogram(lead: pd.Series, protocol: Protocol) -> str:
    each = {steps: int((lead == steps).sum()) for steps in range(1, protocol.max_lead + 1)}
    counts = ", ".join(f"{steps}: {count}" for steps, count in each.items())
    return f"{counts}; more: {int((lead > protocol.max_lead).sum())}; none before: " + str(
        lead.isna().sum()
    )


def _first_name(names: str) -> str:
    first, *rest = names.split() or ["-"]
    return f"{first} +{len(rest)}" if rest else first


def _text(table: pd.DataFrame) -> str:
    return table.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")


def _write(out: Path, tables: dict, runs: Runs, protocol: Protocol, tensor: str) -> None:
    """Writes the tables of one run, and a picture of loss and RMS_t around each loss spike."""
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
    frame = rms_and_loss.query(runs, protocol, tensor)
    for step in tables["spikes"]["step"] if len(frame) else ():
        with style():
            figure = Figure(layout="constrained", figsize=(COLUMN_WIDTH, 3.4))
            part = frame[(frame["step"] - step).abs() <= AROUND]
            rms_and_loss.plot(part, figure.subplots())
            figure.savefig(out / f"spike_{step}.png")
    print(f"Wrote {out}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.spikes", description="Lists the spikes of runs."
    )
    parser.add_argument("--run", required=True, help="a run directory, a folder of runs, or a URL")
    parser.add_argument("--tensor", default=TENSOR, help=f"glob of tensors [{TENSOR}]")
    parser.add_argument("--out", type=Path, help="folder for tables and pictures")
    parser.add_argument(
        "--protocol", choices=("run", *PROTOCOLS), default="run", help="thresholds [the run's own]"
    )
    for name, meaning in THRESHOLDS.items():
        kind = float if name in FRACTIONS else int
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=meaning)
    options = parser.parse_args(arguments)
    smallest = {"window": 2, "num_deviations": 1, "within": 1, "max_lead": 1}
    for name in THRESHOLDS:
        value, least = getattr(options, name), smallest.get(name, 0)
        if value is not None and not value >= least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    return options


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parse(arguments)
    given = {k: v for k, v in vars(options).items() if k in THRESHOLDS and v is not None}
    tensor = options.tensor
    runs = load_runs(options.run)
    for summary in runs.runs.to_dict("records"):
        one = runs.only(summary["run"])
        series = read_series(one, summary["run"])
        names = list(series.rms)
        if names and not any(fnmatchcase(name, tensor) for name in names):
            known = f"{len(names)} tensors, such as {', '.join(names[:6])}"
            raise ChoiceError(f"no tensor matches {tensor!r}; there are {known}")
        protocol = PROTOCOLS.get(options.protocol) or protocol_of_run(summary)
        protocol = replace(protocol, **given)
        text, tables = describe(series, protocol, tensor)
        thresholds = " ".join(f"{name}={getattr(protocol, name)}" for name in THRESHOLDS)
        print(f"\n{summary['run']}: {summary['note'] or summary['state']}\n{text}\n\n{thresholds}")
        if options.out is not None and tables:
            out = options.out / Path(summary["path"]).resolve().name
            _write(out, tables, one, protocol, tensor)
    return 0


if __name__ == "__main__":
    cli.run(main)

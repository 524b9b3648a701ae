"""The spikes of runs: `python -m analysis.spikes --run DIR [--tensor PATTERN]`.

Prints each loss spike with its onset and the RMS spikes before it, and how often loss spikes follow
RMS spikes for each tensor and by chance. `lowprec/diagnostics/README.md` has the definitions.
"""

from dataclasses import replace
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from analysis import cli, paper, spike_marks
from analysis.cli import ChoiceError
from analysis.comparison import counted
from analysis.load import load_runs
from lowprec.diagnostics.spikes import PROTOCOLS, Protocol, loss_spikes, relative_rms, rms_spikes
from lowprec.waiting import doing

NUM_TENSORS = 10  # printed


def describe(series: spike_marks.Series, protocol: Protocol, tensor: str) -> str:
    """Text about the spikes of one run."""
    if reason := spike_marks.why_unexamined(len(series.loss), protocol):
        return f"Nothing was examined: {len(series.loss):,} steps are recorded, and {reason}."
    spikes = spike_marks.spike_table(series, protocol, tensor)
    lines = _summary_lines(series, protocol, tensor, spikes)
    if np.isnan(series.rms_of(tensor)[protocol.ignore_steps :]).all():
        spikes = spikes.drop(columns=["lead", "onset_lead", "rms", "rho"])
    if len(spikes):
        lines += ["", _text(spikes.drop(columns="tensors")), "", *_legend(spikes, protocol, tensor)]
        if not series.rms.empty:
            table = spike_marks.lead_table(series, protocol)
            lines += ["", *_title_of_tensors(series, len(table)), _text(table.head(NUM_TENSORS))]
    return "\n".join(lines)


def _summary_lines(
    series: spike_marks.Series, protocol: Protocol, tensor: str, spikes: pd.DataFrame
) -> list[str]:
    rms, num_spikes = series.rms_of(tensor), counted(len(spikes), "loss spike")
    if not np.isfinite(series.loss).any():
        num_spikes = "No finite loss is recorded"
    late = rms[protocol.ignore_steps :]
    single = [] if len(spikes) else _single_outliers(series, protocol)
    if unrecorded := spike_marks.why_unrecorded(series, protocol, tensor):
        return [f"{num_spikes} in {len(rms):,} steps; {unrecorded}.", *single]
    counts = f"{counted(int(rms_spikes(rms, protocol).sum()), 'RMS spike')} ({tensor})"
    if reason := spike_marks.why_unreachable(series.beta2, protocol):
        counts = f"no possible RMS spikes ({tensor}): {reason}"
    step = int(np.nanargmax(late)) + protocol.ignore_steps + 1
    rho = np.fmax.reduce(relative_rms(rms, series.beta2)[protocol.ignore_steps :])
    return [
        f"{num_spikes} and {counts} in {len(rms):,} steps.",
        *single,
        f"Largest RMS_t: {np.nanmax(late):.3g} at step {step}; largest rho = RMS_t sqrt(1 - "
        f"beta2): {rho:.3g} (at most 1).",
        *(_lead_lines(series, protocol, rms, spikes) if len(spikes) else []),
    ]


def _single_outliers(series: spike_marks.Series, protocol: Protocol) -> list[str]:
    """A line on losses that would be spikes if one outlier were enough; none if there are none."""
    steps = np.flatnonzero(loss_spikes(series.loss, replace(protocol, num_deviations=1)))
    if not len(steps):
        return []
    highest = steps[np.argmax(series.loss[steps])]
    return [
        f"{counted(len(steps), 'single outlier')}, the highest {series.loss[highest]:.4g} at step "
        f"{highest + 1}: a loss spike has {protocol.num_deviations} within {protocol.within} steps "
        "(--num-deviations 1 counts single ones)."
    ]


def _lead_lines(
    series: spike_marks.Series, protocol: Protocol, rms: np.ndarray, spikes: pd.DataFrame
) -> list[str]:
    counts = spike_marks.count_following(series, rms, protocol)
    first = (
        f"{counts['num_following']} of {len(spikes)} loss spikes ({counts['share']:.0%}) come 1 "
        f"to {protocol.max_lead} steps after an RMS spike; counted from the onset, "
        f"{counts['num_by_onset']} of {counts['num_onsets']}."
    )
    interval = f" (95%: {counts['low']:.0%} to {counts['high']:.0%})"
    chance = (
        f"By chance {counts['chance']:.1%}{'' if np.isnan(counts['low']) else interval}, p = "
        f"{counts['p_value']:.2g} (onset: {counts['p_by_onset']:.2g})."
    )
    same = spike_marks.coinciding_note(spike_marks.num_coinciding(spikes, rms, protocol))
    return [f"{first} {same}".rstrip(), chance, f"{paper.FOLLOWING_SAID}"]


def _legend(spikes: pd.DataFrame, protocol: Protocol, tensor: str) -> list[str]:
    """Lines that explain the columns of `spike_table`, and the first tensors before each spike."""
    of_tensor = [
        f"lead, onset_lead: steps from the latest RMS spike of {tensor} to the step, to the onset",
        f"rms, rho: its largest RMS_t and RMS_t sqrt(1 - beta2) from {protocol.max_lead} steps "
        "before the step up to it",
    ]
    lines = [
        f"height: peak, the largest loss up to {protocol.within} steps later, minus before, the "
        f"median loss of the {protocol.window} steps before",
        *(of_tensor if "lead" in spikes else []),
        f"num_tensors: tensors with an RMS spike 1 to {protocol.max_lead} steps before the step, "
        "the earliest first:",
    ]
    for step, text in zip(spikes["step"], spikes["tensors"], strict=True):
        names = text.split()
        more = f" and {len(names) - NUM_TENSORS} more" if len(names) > NUM_TENSORS else ""
        lines.append(f"{step:>8}  {' '.join(names[:NUM_TENSORS]) or '-'}{more}")
    return lines


def _title_of_tensors(series: spike_marks.Series, num: int) -> list[str]:
    """Lines above the table by tensor, which has `num` rows in all."""
    most = f"the {NUM_TENSORS} most followed of " if num > NUM_TENSORS else ""
    lines = [f"By tensor, {most}{counted(num, 'tensor')} with RMS_t (each p is for one alone):"]
    others = series.events.loc[~series.events["tensor"].isin(series.rms.columns), "tensor"]
    if others.any():
        lines.append(f"Of {others.nunique()} others, only RMS spikes are recorded, as events.")
    return lines


def _text(table: pd.DataFrame) -> str:
    table = table.astype(dict.fromkeys(table.select_dtypes("Int64"), float))  # prints no <NA>
    return table.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = cli.Parser(prog="python -m analysis.spikes", description="Lists the spikes of runs.")
    parser.add_argument("--run", required=True, help="a run directory, a folder of runs, or a URL")
    parser.add_argument("--tensor", help=f"glob of tensors [{spike_marks.TENSOR}]")
    choices = ("run", *PROTOCOLS)
    parser.add_argument("--protocol", choices=choices, help="thresholds [the run's own]")
    for name, meaning in spike_marks.THRESHOLDS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=spike_marks.KINDS[name], metavar="N", help=meaning)
    options = parser.parse_args(arguments)
    values = {name: getattr(options, name) for name in spike_marks.THRESHOLDS}
    changed = {name: value for name, value in values.items() if value is not None}
    tensor = options.tensor or spike_marks.TENSOR
    runs = load_runs(options.run)
    for summary in runs.runs.to_dict("records"):
        doing(f"examining {summary['run']}")
        series = spike_marks.read_series(runs.only(summary["run"]))
        names = list(series.rms)
        if options.tensor and names and not any(fnmatchcase(name, tensor) for name in names):
            recorded = f"{len(names)} tensors, such as {', '.join(names[:6])}"
            raise ChoiceError(f"no tensor matches {tensor!r}; there are {recorded}")
        protocol = PROTOCOLS.get(options.protocol) or spike_marks.protocol_of_run(summary)
        try:
            protocol = replace(protocol, **changed)
        except ValueError as error:
            raise ChoiceError(error) from error
        text = describe(series, protocol, tensor)
        verdict, why = spike_marks.collapse_of(summary, series.loss)
        text = f"{verdict.capitalize()}: {why}.\n{text}" if verdict else text
        thresholds = " ".join(f"{name}={getattr(protocol, name)}" for name in values)
        ignored = summary.get("diagnostics.spikes.ignore_steps")
        if pd.isna(ignored) and protocol.ignore_steps == spike_marks.warmup_of(summary):
            thresholds += f"\nThe first {protocol.ignore_steps:,} steps, the warmup, are ignored."
        print(f"\n{summary['run']}: {summary['note'] or summary['state']}\n{text}\n\n{thresholds}")
    return 0


if __name__ == "__main__":
    cli.run(main)

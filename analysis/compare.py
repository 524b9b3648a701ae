"""Which setting is better, and is the difference larger than chance?

`python -m analysis.compare --runs DIR` prints `compare(load_runs(DIR))`.
"""

import math
import sys
from typing import NamedTuple

import pandas as pd

from analysis import cli, comparison, measures, spike_marks
from analysis.evidence import Sample
from analysis.load import NoRunsError, Runs, load_runs
from analysis.run_files import DEFAULTS
from lowprec.nearest import nearest
from lowprec.runs.read import ENDED

SCORES = ("recall", "accuracy")  # the first that was evaluated counts
NAMED = ("model.name", "precision.label", "optimizer.name")  # whose values need no key beside them
TITLES = {  # of values, in print
    "final loss": "final loss (nats)",
    "recall": "R@1 (%)",
    "accuracy": "top-1 (%)",
    "spikes": "loss spikes",
    "highest": "highest spike (nats)",
}


class Comparison(NamedTuple):
    """The settings of some runs, compared by their final values.

    `keys` are the settings in which the runs differ besides the seed, or `model.name` if there are
    none; one that follows from others is left out. `runs` has a row per run that has ended: those
    of `Runs.runs`, `setting` (`adamw, beta2=0.9`) and the values: `final loss`, as
    `measures.final_loss` (inf if it diverged); `recall`, the mean R@1 of both directions in %, or
    else `accuracy`, zero-shot top-1 in % (0 if it diverged); `spikes` and `highest`, the number of
    loss spikes and the height of the highest (NaN in runs that are too short). `means` [settings,
    values] and `differences` from `baseline` are `Sample`s over seeds; runs are paired by seed
    where all keys but `varied` are equal. `unpaired` are the settings without such a pair. Printed,
    a comparison is both tables with units, and these settings.
    """

    keys: list[str]
    runs: pd.DataFrame
    means: pd.DataFrame
    varied: str
    baseline: str
    differences: pd.DataFrame
    unpaired: list[str]

    def __str__(self) -> str:
        parts = ["Means over seeds, with 95% intervals:", self.means.rename(columns=TITLES)]
        if len(self.differences):
            titles = {what: title.replace("(%)", "(points)") for what, title in TITLES.items()}
            parts += [f"\nMinus {self.varied} = {self.baseline}, by seed, with 95% intervals:"]
            parts += [self.differences.rename(columns=titles)]
        if self.unpaired:
            why = f"no run with the same seed differs in {self.varied} alone"
            parts += [f"\nUnpaired, because {why}: {'; '.join(self.unpaired)}"]
        return "\n".join(part if isinstance(part, str) else part.to_string() for part in parts)


def compare(runs: Runs, varied: str = "", baseline: str = "") -> Comparison:
    """Compares runs by the setting `varied`, by default the first of `keys` besides `model.name`.

    Differences are from `baseline`, a value of `varied`. Its default is the config's default value,
    such as bf16 or adamw, or the first in `means` if no run has that. Raises NoRunsError if no run
    has ended or none has a loss, and ValueError for another setting or value than theirs.
    `precision` stands for `precision.label`, and so on.
    """
    table = runs.runs.set_index("run").loc[measures.named_heads(runs)["run"]].reset_index()
    names = dict.fromkeys([*NAMED, *comparison.columns(table)])
    settings = table[list(names)].map(comparison.written)
    keys, num = [], 1
    for key in settings:
        if (more := len(settings[[*keys, key]].drop_duplicates())) > num:
            keys, num = [*keys, key], more
    keys = keys or ["model.name"]
    texts = [settings[k] if k in NAMED else f"{comparison.short(k)}=" + settings[k] for k in keys]
    setting = pd.concat(texts, axis=1).agg(", ".join, axis=1)
    table = table.assign(**settings[keys], setting=setting)
    ended = table[table["state"].isin(ENDED)]
    if ended.empty:
        raise NoRunsError(f"{runs.root}: no run has ended yet{runs.notes}")
    name, varied = varied, next((key for key in keys if key != "model.name"), keys[0])
    if name and not (varied := comparison.column_of(name, keys)):
        differ = f"the runs differ in {', '.join(keys)}; seeds are averaged"
        raise ValueError(f"varied={name}: {differ}{comparison.nearest_key(name, keys)}")
    known = list(ended[varied].unique())
    default = comparison.written(({"precision.label": "bf16"} | DEFAULTS).get(varied))
    baseline = baseline or (default if default in known else known[0])
    if baseline not in known:
        one_of = f"one of {', '.join(known)}{nearest(baseline, known)}"
        raise ValueError(f"baseline={baseline}: {one_of}")
    ended, values = _final_values(runs, ended)
    equal = [*(key for key in keys if key != varied), "seed", "what"]
    finals = ended.melt(["setting", *keys, "seed"], values, "what").dropna(subset="value")
    if finals.empty:
        raise NoRunsError(f"{runs.root}: no run has a final loss or score{runs.notes}")
    by = ["setting", *keys, "seed", "what"]
    finals = finals.groupby(by, sort=False)["value"].mean().reset_index()
    is_baseline = finals[varied] == baseline
    pairs = finals[~is_baseline].merge(finals[is_baseline], on=equal, suffixes=("", "_before"))
    pairs["value"] -= pairs["value_before"]
    means, differences = (
        part.groupby(["setting", "what"], sort=False)["value"]
        .apply(Sample.of, sign=sign)
        .unstack("what")
        for part, sign in ((finals, ""), (pairs, "+"))
    )
    paired = {*pairs["setting"], *pairs["setting_before"]}
    unpaired = [setting for setting in means.index if setting not in paired and len(known) > 1]
    return Comparison(keys, ended, means, varied, baseline, differences, unpaired)


def _final_values(runs: Runs, ended: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows with their final values, and the names of these columns."""
    ended = measures.with_scores(runs, ended)
    scores = [name for name in SCORES if ended[name].notna().any()][:1]
    diverged = ended["state"] == "diverged"
    ended.loc[diverged, scores] = 0.0
    losses = runs.metrics.groupby("run")["loss"].agg(measures.final_loss)
    ended["final loss"] = ended["run"].map(losses).mask(diverged, math.inf)
    ended[["spikes", "highest"]] = math.nan
    for at, head in ended.iterrows():
        series = spike_marks.read_series(runs.only(head["run"]), spike_marks.TENSOR)
        protocol = spike_marks.protocol_of_run(head)
        if not series.why_unexamined(protocol):
            heights = spike_marks.spike_table(series, protocol)["height"]
            ended.loc[at, ["spikes", "highest"]] = len(heights), max(heights, default=0.0)
    return ended, ["final loss", *scores, "spikes", "highest"]


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    about = "Compares the settings of runs over seeds."
    parser = cli.Parser(prog="python -m analysis.compare", description=about)
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    runs = load_runs(parser.parse_args(arguments).runs)
    found = compare(runs)
    print(found)
    rest = runs.where(~runs.summaries["run"].isin(found.runs["run"]))
    if len(rest):
        print(f"left out: {comparison.counted(len(rest), 'run')}{rest.notes}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    cli.run(main)

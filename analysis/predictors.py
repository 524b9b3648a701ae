"""What warnings by each score are worth: `python -m analysis.predictors --runs DIR`.

Prints a table in Markdown for runs of AdamW with at least two values of beta2 (`--experiment NAME`
chooses some). Only ended runs count, of seeds with one at every beta2; what is left out is printed.
Each beta2's threshold is the best one in the runs of the other values, see
`analysis.figures.early_warnings`; the last rows have the threshold of arXiv:2506.04805.
"""

import numpy as np
import pandas as pd

from analysis import cli
from analysis.cli import ChoiceError
from analysis.comparison import counted
from analysis.figures import early_warnings
from analysis.figures.early_warnings import COUNTS, shares_of
from analysis.load import load_runs
from lowprec.runs.read import ENDED

HORIZON = 8  # steps
OWN_THRESHOLD = 1.0  # of curvature times half the learning rate
NAMES = {
    "rms": "RMS_t of the patch embedding",
    "rho": "rho = RMS_t sqrt(1 - beta2)",
    "deviation": "gradient norm: standard deviations above the mean of 100 steps",
    "cusum": "gradient norm: CUSUM of these deviations, less 0.5 a step",
    "curvature": "curvature along the gradient",
    "sustained": "least of three such curvatures in a row",
    "gradient_kurtosis": "kurtosis of the patch embedding's gradient",
    "activation_kurtosis": "kurtosis of a block's output, the largest over blocks",
    "rms_at_measured": "RMS_t at every second step",
}
HEADER = (
    *("score", "warnings that a spike follows", "spikes that have a warning", "mean lead, steps"),
    *("F1", "F1 from the onset", "F1 of RMS_t minus it"),
    "F1 of RMS_t at every second step minus it",
)
MEASURED = ("curvature", "sustained", "gradient_kurtosis", "activation_kurtosis")


def of_whole_seeds(heads: pd.DataFrame, frame: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows of `frame` for ended runs of seeds that have one at every beta2, and notes.

    `heads` are the rows of `Runs.runs` that `frame` was made of; `frame` lacks those without RMS_t
    of the patch embedding. The notes name what is left out. Raises ChoiceError if no seed is left.
    """
    beta2, seed, notes = heads["optimizer.beta2"], heads["seed"], []
    is_usable = heads["state"].isin(ENDED) & heads["run"].isin(frame["run"])
    num_beta2 = beta2[is_usable].groupby(seed[is_usable]).nunique()
    is_kept = is_usable & seed.isin(num_beta2.index[num_beta2 == beta2.nunique()])
    if not is_kept.any():
        values = ", ".join(f"{value:g}" for value in sorted(beta2.unique()))
        raise ChoiceError(f"no seed has an ended run at every beta2 of the runs: {values}")
    if num := int((~is_usable).sum()):
        notes.append(f"left out: {counted(num, 'run')} that did not end or recorded no RMS_t")
    for value, num in seed[is_usable & ~is_kept].value_counts(sort=False).items():
        run = counted(num, "run")
        notes.append(f"left out: {run} of seed {value:.0f}, which has not ended at every beta2")
    return frame[frame["run"].isin(heads.loc[is_kept, "run"])], notes


def worth(frame: pd.DataFrame) -> list[list[str]]:
    """The rows of the table, by HEADER, for a frame of `early_warnings.warnings`.

    The interval of a difference is left out if a value of beta2 has a single run.
    """
    shares, rows = early_warnings.transferred(frame), []
    has_intervals = bool(frame.groupby("beta2")["run"].nunique().min() > 1)

    def minus(reference: str, score: str) -> str:
        """The difference of F1, which is 0 without a warning."""
        f1 = [np.nan_to_num(shares["detection", s, HORIZON][:, -1]) for s in (reference, score)]
        low, high = early_warnings.interval((f1[0] - f1[1])[1:])
        return f"{f1[0][0] - f1[1][0]:.2f}" + f" ({low:.2f} to {high:.2f})" * has_intervals

    for score in early_warnings.THRESHOLDS:
        if ("detection", score, HORIZON) not in shares:
            continue
        cells = _cells(*(shares[side, score, HORIZON][0] for side in ("detection", "onset")))
        last = minus("rms", score) if score != "rms" else "-"
        as_often = minus("rms_at_measured", score) if score in MEASURED else "-"
        rows.append([NAMES[score], *cells, last, as_often])
    is_own = np.isclose(frame["threshold"], OWN_THRESHOLD) & (frame["horizon"] == HORIZON)
    for score in ("curvature", "sustained"):
        own = frame[is_own & (frame["score"] == score)].groupby("counted_from")[list(COUNTS)].sum()
        if len(own):
            own = shares_of(own.loc[["detection", "onset"]].to_numpy(float))
            rows.append([f"{NAMES[score]}, at the threshold 2 / lr", *_cells(*own), "-", "-"])
    return rows


def _cells(detection: np.ndarray, onset: np.ndarray) -> list[str]:
    """Shares, mean lead ("-" without one) and F1, by the rows of `shares_of` for both counts."""
    precision, by_chance, recall, recall_by_chance, lead, f1 = detection
    return [
        f"{precision:.0%} ({by_chance:.1%})",
        f"{recall:.0%} ({recall_by_chance:.1%})",
        "-" if np.isnan(lead) else f"{lead:.1f}",
        *(f"{f1:.2f}", f"{onset[-1]:.2f}"),
    ]


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = cli.Parser(prog="python -m analysis.predictors", description="Compare scores.")
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    parser.add_argument("--experiment", help="experiment whose runs to compare [any]")
    options = parser.parse_args(arguments)
    figure = early_warnings.FIGURES["spike_warnings"]
    runs = figure.selected(load_runs(options.runs, experiment=options.experiment))
    heads = runs.runs.dropna(subset="scale")
    frame, left_out = of_whole_seeds(heads, figure.query(runs))
    if frame["beta2"].nunique() < 2:
        raise ChoiceError(f"--runs {options.runs}: a threshold needs runs of at least two beta2")
    spikes = frame.drop_duplicates("run")["num_spikes"].sum()
    if not spikes:
        num = counted(frame["run"].nunique(), "run")
        raise ChoiceError(f"--runs {options.runs}: no loss spike to predict in {num}")
    for cells in (HEADER, ["---"] * len(HEADER), *worth(frame)):
        print(f"| {' | '.join(cells)} |")
    print(f"\n{frame['run'].nunique()} runs, {spikes:.0f} loss spikes, horizon {HORIZON} steps")
    print("".join(f"{note}\n" for note in left_out), end="")
    return 0


if __name__ == "__main__":
    cli.run(main)

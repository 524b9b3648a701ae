"""How far recipes part from bf16 within some steps from one state, by replays of these steps.

Not in the paper. Runs: `experiment=branches`, replayed in each recipe and from perturbed weights.
The rules are those of experiments/PROTOCOL.md, "Paired branches".
"""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from scipy import stats

from analysis import marks, measures, naming, style
from analysis.evidence import LEVEL, TWO_ONE_SIDED, UNDECIDED
from analysis.figures.replays import CONTROL, PERTURBED, read_replays
from analysis.grammar import Panels
from analysis.load import Runs
from analysis.size_judges import LOG_MARGIN, MARGIN

BF16, CODE_BOOKS = "bf16", "code_books"
COLUMNS = (*measures.OF_A_RUN, "after", "recipe", "perturbation", "difference", "error")
COLUMNS += ("num_bf16", "scatter", "bf16_scatter", "replayed_steps", "is_finite", "control_off")
COLUMNS += ("outcome",)
STATES, STEPS, NUM_BF16 = 2, 100, 5  # that the rule of `outcome` needs


def branches(runs: Runs) -> pd.DataFrame:
    """Returns one row per replay, of runs with tables of replayed steps.

    `after` is the step of the state. `difference` is the mean log loss of the second half of the
    steps minus its mean over the replays in bf16, which are the control and those from perturbed
    weights; NaN if the replay ended early or has a loss that is not finite. `error` is the standard
    error of the difference of one more replay in bf16, whose number is `num_bf16`. `scatter` is the
    standard deviation, over these steps, of the log loss minus the control's, and `bf16_scatter`
    its median over the perturbed replays. `replayed_steps` is the number of the control's steps,
    `is_finite` whether all losses of the replay are, and `control_off` the control's largest
    difference from the recorded losses (nats). `outcome` is that of the recipe; in bf16, empty.
    """

    def of_run(run: Runs, head: dict) -> pd.DataFrame:
        return read_replays(head, compare, is_table=False)

    frame = measures.by_run(runs, measures.named_heads(runs), COLUMNS[:-1], of_run)
    frame["outcome"] = ""
    for (_, recipe), rows in frame.groupby(["run", "recipe"]):
        frame.loc[rows.index, "outcome"] = "" if recipe == BF16 else outcome(rows)
    return frame


def compare(steps: pd.DataFrame) -> pd.DataFrame:
    """The rows of `branches` for the steps of all replays from one state.

    Replays from a later step (`change_from`) begin from other states and are left out.
    """
    first, recorded = steps["step"].min(), steps[steps["change"] == "recorded"]
    steps = steps[(steps["change"] != "recorded") & (steps["change_from"] == first)]
    steps = steps.astype({"loss": float, "perturbation": float})
    control = steps[steps["change"] == CONTROL].set_index("step")["loss"]
    logs = np.log(steps["loss"].where(steps["loss"] < math.inf))
    logs = steps.assign(loss=logs, perturbation=steps["perturbation"].fillna(0)).pivot(
        index="step", columns=["change", "perturbation"], values="loss"
    )
    half = logs.iloc[len(logs) // 2 :]
    means, scatter = half.mean(skipna=False), half.sub(half[CONTROL, 0], axis=0).std()
    change = means.index.get_level_values("change")
    in_bf16 = means[change.isin([CONTROL, PERTURBED])]
    frame = pd.DataFrame({"difference": means - in_bf16.mean(skipna=False), "scatter": scatter})
    facts = {"after": logs.index[0] - 1, "recipe": change.map(_recipe), "num_bf16": len(in_bf16)}
    facts["error"] = in_bf16.std(skipna=False) * math.sqrt(1 + 1 / len(in_bf16))
    facts["bf16_scatter"] = scatter[change == PERTURBED].median()
    facts["replayed_steps"] = len(control)
    facts["control_off"] = (control - recorded.set_index("step")["loss"]).abs().max()
    is_finite = np.isfinite(steps["loss"]).groupby(
        [steps["change"], steps["perturbation"].fillna(0)]
    )
    frame["is_finite"] = is_finite.all()
    return frame.assign(**facts).reset_index("perturbation")


def _recipe(change: str) -> str:
    """The recipe of a replay: a label, CODE_BOOKS, or BF16 if nothing but weights is changed."""
    if change in (CONTROL, PERTURBED):
        return BF16
    return CODE_BOOKS if "e4m3_bnb" in change else change.removeprefix("precision=")


def interval(rows: pd.DataFrame, level: float) -> tuple[pd.Series, pd.Series]:
    """The lower and upper ends of the differences in log loss, by t."""
    half = rows["error"] * stats.t.ppf((1 + level) / 2, rows["num_bf16"] - 1)
    return rows["difference"] - half, rows["difference"] + half


def outcome(rows: pd.DataFrame) -> str:
    """What the replays in one recipe, one from each state, show: the rule of PROTOCOL.md.

    Undecided unless there are both states, each with the control and the nulls over all steps. A
    replay that was cut off at a finite loss does not count.
    """
    is_planned = (rows["replayed_steps"] == STEPS) & (rows["num_bf16"] == NUM_BF16)
    is_whole = is_planned & rows["error"].notna()
    if not len(rows) == rows["after"].nunique() == STATES or not is_whole.all():
        return UNDECIDED
    if not rows["is_finite"].all():
        return "diverges"
    low, high = interval(rows, LEVEL)
    near_low, near_high = interval(rows, TWO_ONE_SIDED)
    if (rows["bf16_scatter"] < rows["scatter"] / 2).any():
        return UNDECIDED
    if (low > 0).all() or (high < 0).all():
        return "differs"
    is_near = (near_low >= -LOG_MARGIN) & (near_high <= LOG_MARGIN)
    return f"equal within {MARGIN:g}%" if is_near.all() else UNDECIDED


def plot(frame: pd.DataFrame, ax: Axes) -> None:
    """A row for each state and recipe: its replays, with the interval of a recipe's only one."""
    ranks = frame["recipe"].map(naming.order("precision.label"))
    values, names = 100 * np.expm1(frame["difference"]), []
    places = frame.groupby(["after", "run", ranks])
    spread = marks.spread(places.ngroup(), values, log=False)
    for (after, *_), part in places:
        if (title := f"from step {after:,}") not in names:
            names.append(title)
        own, recipe = values[part.index], part["recipe"].iloc[0]
        low, high = (100 * np.expm1(end.iloc[0]) for end in interval(part, LEVEL))
        marks.draw_row(
            ax, len(names), own, own.mean(), style.color(recipe), spread=spread[own.index],
            ends=None if recipe == BF16 else (low, high),
        )  # fmt: skip
        names.append(naming.precision(recipe))
    marks.name_rows(ax, names, [name.startswith("from step") for name in names])
    marks.draw_reference(ax, 0, MARGIN, "x")
    ax.set_xlabel("training loss relative to bf16 (%)")


def undecided(frame: pd.DataFrame) -> str:
    """The title of `branches`, if all recipes are undecided and begin from both states."""
    states = frame.groupby("recipe")["after"].nunique()
    if {*frame["outcome"]} - {""} != {UNDECIDED} or (states != STATES).any():
        return ""
    return "From both states, no recipe is shown to differ from bf16 or to equal it"


FIGURES = {
    "branches": Panels(
        studies=("branches",),
        table=branches,
        plots=(plot,),
        title=undecided,
        size=(1.5, 2.2),
        what="training loss in each recipe from one state, relative to bf16,",
        text="Points: means over the second half of the replayed steps; bf16 has the unchanged "
        "replay and those from weights perturbed in the last digit. Bars: their mean; 95% "
        "intervals by the standard deviation in bf16. A cross: a replay that ended early. Gray: "
        f"{MARGIN:g}%, the margin of equality.",
    )
}

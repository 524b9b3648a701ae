"""Loss and RMS_t of a run as series, their spikes, and tables of both."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

import numpy as np
import pandas as pd

from analysis import measures, run_files
from analysis.load import NoRunsError, Runs
from lowprec.config.schema import num_warmup_steps
from lowprec.diagnostics.spikes import (
    LAST_STEPS,
    NEAR_CHANCE,
    PROTOCOLS,
    Collapse,
    Protocol,
    lag_coincidence,
    largest_rms,
    leads,
    loss_spikes,
    onsets,
    protocol_of,
    relative_rms,
    rms_spikes,
)

TENSOR = "visual.conv1.weight"  # the patch embedding
THRESHOLDS = {
    "rms_threshold": "RMS_t of an RMS spike",
    "loss_sigmas": "standard deviations that make a loss an outlier",
    "num_deviations": "outliers that make a loss spike",
    "within": "steps within which they come, and within which a spike counts once",
    "ignore_steps": "first steps, which are ignored",
    "window": "steps of the running mean",
    "max_lead": "steps after an RMS spike within which a loss spike follows it",
}
OF_A_RUN = ("run", "scale", "data", "model", "optimizer", "beta2", "seed", "state", "label")
KINDS = {name: type(value) for name, value in asdict(Protocol()).items()}  # int or float
NUM_NAMES = 4  # of tensors to choose from
LARGE = 1.0  # nats: the height above which a loss spike is large
FOLLOWING = "#D55E00"  # a loss spike that follows an RMS spike; others are gray


@dataclass(frozen=True, eq=False)
class Series:
    """Series of one run; NaN if unrecorded.

    Loss [steps], gradient norm [steps], RMS_t [steps, tensors] and beta2 [steps].

    `events` are the RMS spikes that training found, as `rms_events` returns them. `predictors` has
    what `experiments.predictors` measured, [steps, scores], or no columns.
    """

    loss: np.ndarray
    grad_norm: np.ndarray
    rms: pd.DataFrame
    beta2: np.ndarray
    events: pd.DataFrame
    predictors: pd.DataFrame = field(default_factory=pd.DataFrame)

    def rms_of(self, pattern: str) -> np.ndarray:
        """[steps]: the largest RMS_t of the tensors that match."""
        matching = [name for name in self.rms if fnmatchcase(name, pattern)]
        return np.fmax.reduce(self.rms[matching].to_numpy(float), axis=1, initial=np.nan)

    def why_unexamined(self, protocol: Protocol) -> str:
        """`why_unexamined` of its steps, which also need a finite loss."""
        text = "" if np.isfinite(self.loss).any() else "none has a finite loss"
        return why_unexamined(len(self.loss), protocol) or text

    def rms_spikes(self, protocol: Protocol) -> pd.DataFrame:
        """One row per RMS spike: step, tensor and rms, by step, the highest of a step first.

        Spikes of tensors without a column in `rms` come from `events`, which training found with
        the run's own thresholds: a lower `rms_threshold` finds no more of them, and a higher one
        misses those that begin below it.
        """
        values = self.rms.to_numpy(float)
        rows, columns = np.nonzero(rms_spikes(values, protocol))
        names, rms = self.rms.columns[columns], values[rows, columns]
        own = pd.DataFrame({"step": rows + 1, "tensor": names, "rms": rms})
        others = self.events[~self.events["tensor"].isin(self.rms.columns)]
        others = others[others["step"] > protocol.ignore_steps]
        others = others[others["rms"] >= protocol.rms_threshold]
        parts = [part for part in (own, others) if len(part)]
        spikes = pd.concat(parts) if parts else others
        return spikes.sort_values(["step", "rms"], ascending=[True, False], kind="stable")


def read_series(run: Runs, pattern: str = "*") -> Series:
    """The series of `run`, which holds one run, up to the last step that has a row."""
    metrics = run.metrics.set_index("step")
    last = 0 if metrics.empty else int(metrics.index.max())
    steps = pd.RangeIndex(1, last + 1, name="step")
    try:
        rms = run.tensors(pattern, "rms").drop(columns="run")
        rms = rms.drop_duplicates("step", keep="last").set_index("step").reindex(steps)
    except LookupError:
        rms = pd.DataFrame(index=steps)
    summary = run.summaries.iloc[0]
    settings = (summary.get(f"optimizer.{name}", np.nan) for name in ("beta2", "beta2_decay"))
    beta2 = beta2_by_step(*settings, last)
    columns = metrics.reindex(index=steps, columns=["loss", "grad_norm"]).astype(float)
    loss, grad_norm = columns.to_numpy().T
    return Series(loss, grad_norm, rms, beta2, rms_events(run.events), _predictors(run, steps))


def _predictors(run: Runs, steps: pd.RangeIndex) -> pd.DataFrame:
    """The rows of predictors.jsonl by step, NaN where none was measured; the last of a step."""
    rows, _ = run_files.read_row_file(run.summaries.iloc[0].to_dict(), "predictors")
    if not rows:
        return pd.DataFrame(index=steps)
    table = pd.DataFrame(rows).drop_duplicates("step", keep="last").set_index("step")
    return table.apply(pd.to_numeric, errors="coerce").reindex(steps)


def rms_events(events: pd.DataFrame) -> pd.DataFrame:
    """One row per RMS spike in `Runs.events`, which name all tensors: step, tensor and rms."""
    events = events.reindex(columns=["step", "rms"]).dropna()
    by_tensor = zip(events["step"], events["rms"], strict=True)
    rows = [(step, *item) for step, values in by_tensor for item in values.items()]
    spikes = pd.DataFrame(rows, columns=["step", "tensor", "rms"])
    rms = pd.to_numeric(spikes["rms"], errors="coerce")  # "inf" is text in JSON
    return spikes.assign(rms=rms).astype({"step": int})


def beta2_by_step(beta2: float, decay: float | None, num_steps: int) -> np.ndarray:
    """Beta2 [steps]: 1 - t^-decay under a schedule, else the constant; NaN if unknown."""
    if pd.isna(decay):
        return np.full(num_steps, beta2, dtype=float)
    return 1 - np.arange(1, num_steps + 1, dtype=float) ** -decay


def why_unreachable(beta2: np.ndarray, protocol: Protocol) -> str:
    """A clause that says why RMS_t cannot reach the threshold under beta2 [steps], or ""."""
    largest = beta2[protocol.ignore_steps :].max(initial=-np.inf)
    if np.isinf(largest) or not largest_rms(largest) < protocol.rms_threshold:
        return ""
    sign = "=" if beta2.min() == largest else "<="
    return (
        f"at beta2 {sign} {largest:g}, RMS_t cannot exceed {largest_rms(largest):.2f}, and the "
        f"threshold is {protocol.rms_threshold:g}"
    )


def why_unrecorded(series: Series, protocol: Protocol, tensor: str) -> str:
    """A clause that says that `tensor` has no RMS_t after the ignored steps, or ""."""
    late = series.rms_of(tensor)[protocol.ignore_steps :]
    if not len(late) or not np.isnan(late).all():
        return ""
    names = ", ".join(list(series.rms)[:NUM_NAMES])
    return f"{tensor} is not recorded{names and f': choose with --tensor, such as {names}'}"


def coinciding_note(num: int) -> str:
    """A sentence on loss spikes at the very step of an RMS spike, or ""."""
    cause = "which therefore cannot be the cause; both may have another cause, such as the batch."
    return f"{num} coincide{'s' * (num == 1)} with an RMS spike, {cause}" if num else ""


def num_coinciding(spikes: pd.DataFrame, rms: np.ndarray, protocol: Protocol) -> int:
    """The number of loss spikes, rows of `spike_table`, at whose step an RMS spike begins."""
    return int(rms_spikes(rms, protocol)[spikes["step"] - 1].sum())


def reaching_threshold(heads: pd.DataFrame) -> pd.DataFrame:
    """AdamW's rows of `Runs.runs` in which RMS_t can reach the threshold for RMS spikes."""
    heads, can_spike = of_adamw(heads.dropna(subset="scale")), []
    for head in heads.to_dict("records"):
        settings = head["optimizer.beta2"], head["optimizer.beta2_decay"], int(head["num_steps"])
        can_spike.append(not why_unreachable(beta2_by_step(*settings), protocol_of_run(head)))
    return heads[can_spike]


def by_run(
    runs: Runs, columns: tuple[str, ...], table: Callable[[Series, Protocol], pd.DataFrame]
) -> pd.DataFrame:
    """The rows of `table(series, protocol)` for each run that recorded RMS_t of TENSOR.

    The columns THRESHOLDS follow the given ones. Raises NoRunsError if no run did.
    """
    lacking = {}

    def of_run(run: Runs, head: dict) -> pd.DataFrame:
        protocol, series = protocol_of_run(head), read_series(run, TENSOR)
        if np.isnan(series.rms_of(TENSOR)).all():
            lacking[f"RMS_t of {TENSOR}"] = None
        elif len(series.loss) <= protocol.ignore_steps:
            lacking[f"steps after the first {protocol.ignore_steps:,}, which are ignored"] = None
        else:
            return table(series, protocol).assign(**asdict(protocol))
        return pd.DataFrame()

    named = measures.named_heads(runs, ("optimizer.beta2",))
    frame = measures.by_run(runs, named, (*columns, *THRESHOLDS), of_run)
    if frame.empty and lacking:
        what = f"no run has what is drawn: {', or '.join(lacking)}{runs.notes}"
        raise NoRunsError(f"{runs.root}: {what}")
    return frame


def protocol_of_run(summary: dict) -> Protocol:
    """The protocol of a run's config; the paper's if there is none or the config is damaged."""
    values = {name: summary.get(f"diagnostics.spikes.{name}") for name in THRESHOLDS}
    thresholds = {name: KINDS[name](value) for name, value in values.items() if not pd.isna(value)}
    return protocol_of(summary.get("diagnostics.spikes.protocol"), warmup_of(summary), **thresholds)


def warmup_of(summary: dict) -> int:
    """The warmup of a run in steps; larger than any run if its config is damaged."""
    given, num_steps = summary.get("schedule.warmup_steps"), summary.get("num_steps")
    if pd.isna(num_steps):
        return sys.maxsize
    given = None if pd.isna(given) else int(given)
    return num_warmup_steps(given, int(num_steps), summary.get("schedule.name"))


def why_unexamined(num_steps: int, protocol: Protocol) -> str:
    """Why no loss of so many steps can be a spike, with the option that changes it, or ""."""
    if num_steps <= protocol.ignore_steps:
        return f"the first {protocol.ignore_steps:,} are ignored (--ignore-steps N)"
    if 2 * (num_steps - 1) < protocol.window:
        return f"a spike needs half a window of {protocol.window} before it (--window N)"
    return ""


def collapse_of(summary: dict, loss: np.ndarray) -> tuple[str, str]:
    """The verdict of `Collapse` in words, and what it said last about the losses of a run.

    Or how a collapsed run ended after that; two empty texts for any other run.
    """
    batch_size = summary.get("batch_size", np.nan)
    is_watched = summary.get("data.name") == "unknown"  # another trainer's, perhaps another loss
    if is_watched or not batch_size > 0:  # its config is damaged
        return "", ""
    collapse = Collapse(batch_size, warmup_of(summary), summary["num_steps"])
    verdict = text = ""
    for step, value in enumerate(loss, 1):
        if said := collapse.feed(step, value):
            verdict, text = collapse.verdict.replace("_", " "), said
    end = pd.Series(loss[-LAST_STEPS:]).median()
    if not text or pd.isna(end) or abs(end - collapse.chance) <= NEAR_CHANCE * collapse.chance:
        return verdict, text
    if verdict == "not learning":  # but later
        return "", ""
    text = text.replace("has been", "was").replace("since", "from")
    return verdict, f"{text} on and ends at {end:.3g}"


def of_adamw(summaries: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Runs.runs` for AdamW without a response to warnings, or all if there are none.

    Clipping changes how spikes arise, so a share across optimizers would describe none of them.
    """
    keys = ["optimizer.name", "optimizer.on_warning.action"]
    is_adamw = (summaries.reindex(columns=keys) == ["adamw", "none"]).all(axis=1)
    is_damaged = summaries["scale"].isna()
    return summaries[is_adamw | is_damaged] if is_adamw.any() else summaries


def at_main_rate(heads: pd.DataFrame) -> pd.DataFrame:
    """Leaves out runs of `stability` at another learning rate than most of those they pool with.

    Figures that pool runs of one optimizer and beta2 would not tell these controls apart. Runs of
    a scale, model and optimizer stay if no rate has more of them than every other.
    """
    rates = heads.reindex(columns=["optimizer.lr"])["optimizer.lr"]
    rates = rates.where(heads["experiment"] == "stability")
    keys = heads.reindex(columns=["scale", "model.name", "optimizer.name"])
    alike = rates.groupby([keys[key] for key in keys], dropna=False)
    main = alike.transform(lambda own: own.mode()[0] if len(own.mode()) == 1 else np.nan)
    return heads[rates.isna() | main.isna() | (rates == main)]


@lru_cache(maxsize=4)  # the tables of a run, and the counts for each of its tensors, share them
def marks_and_onsets(series: Series, protocol: Protocol) -> tuple[np.ndarray, np.ndarray]:
    """Bool [steps]: the steps at which a loss spike begins; int64 [spikes]: their onsets."""
    marks = loss_spikes(series.loss, protocol)
    return marks, onsets(series.loss, np.flatnonzero(marks) + 1)


def mark(series: Series, protocol: Protocol, tensor: str = TENSOR) -> pd.DataFrame:
    """One row per step: loss, rms, loss_spike and rms_spike (one begins here), follows.

    `follows` marks loss spikes at most the protocol's `max_lead` steps after an RMS spike.
    """
    rms = series.rms_of(tensor)
    (loss_marks, _), rms_marks = marks_and_onsets(series, protocol), rms_spikes(rms, protocol)
    at, follows = np.flatnonzero(loss_marks), np.zeros(len(rms), bool)
    follows[at] = leads(at, np.flatnonzero(rms_marks)) <= protocol.max_lead
    columns = {"loss": series.loss, "rms": rms, "loss_spike": loss_marks, "rms_spike": rms_marks}
    return pd.DataFrame({"step": np.arange(1, len(rms) + 1), **columns, "follows": follows})


def spike_table(series: Series, protocol: Protocol, tensor: str = TENSOR) -> pd.DataFrame:
    """One row per loss spike, in order.

    Columns: `step` of detection and `onset`; `loss` at the step; `before`, the median loss of the
    window before; `peak`, the largest loss up to `within` steps later; `height` = peak - before;
    `lead` and `onset_lead`, steps from the latest RMS spike of `tensor` to the step and to the
    onset (<NA> if there is none); `rms` and `rho`, the largest RMS_t and rho of `tensor` from
    `max_lead` steps before the step up to it; `tensors`, `num_tensors`: all tensors with an RMS
    spike 1 to `max_lead` steps before the step, the earliest first and the highest of a step first
    (see `Series.rms_spikes`).
    """
    loss_marks, onset = marks_and_onsets(series, protocol)
    at = np.flatnonzero(loss_marks) + 1
    rms = pd.Series(series.rms_of(tensor))
    rms_at = np.flatnonzero(rms_spikes(rms, protocol)) + 1
    recent = pd.DataFrame({"rms": rms, "rho": relative_rms(rms, series.beta2)})
    recent = recent.rolling(protocol.max_lead + 1, min_periods=1).max().iloc[at - 1]
    loss = np.where(np.isfinite(series.loss), series.loss, np.nan)
    spikes = series.rms_spikes(protocol) if len(at) else series.events
    before, peak, tensors = [], [], []
    for step in at.tolist():
        before.append(np.nanmedian(loss[max(0, step - 1 - protocol.window) : step - 1]))
        peak.append(np.nanmax(loss[step - 1 : step + protocol.within]))
        earlier = spikes["step"].between(step - protocol.max_lead, step - 1)
        tensors.append(spikes.loc[earlier.to_numpy(), "tensor"].unique())
    columns = {"step": at, "onset": onset, "loss": loss[at - 1]}
    columns |= {"before": np.array(before, float), "peak": np.array(peak, float)}
    columns["height"] = columns["peak"] - columns["before"]
    columns["lead"] = pd.array(leads(at, rms_at), dtype="Int64")
    columns["onset_lead"] = pd.array(leads(onset, rms_at), dtype="Int64")
    columns |= {"rms": recent["rms"].to_numpy(), "rho": recent["rho"].to_numpy()}
    columns["num_tensors"] = np.array([len(names) for names in tensors], int)
    columns["tensors"] = np.array([" ".join(names) for names in tensors], object)
    return pd.DataFrame(columns)


def spikes_of_run(run: Runs, head: dict) -> pd.DataFrame:
    """`spike_table` of a run, by the protocol of its config."""
    return spike_table(read_series(run, TENSOR), protocol_of_run(head))


def signed_leads(series: Series, protocol: Protocol, side: str = "step") -> pd.DataFrame:
    """One row per loss spike: `lead`, in steps from an RMS spike of TENSOR, and `is_large`.

    The RMS spike is the latest at or before the loss spike, or else the next one. The lead is 0 if
    both begin at one step, below 0 if the loss spike comes first, and NaN if both are more than
    `max_lead` steps apart. `side` is the column of `spike_table` from which spikes are counted;
    spikes that share an onset count once. `is_large`: higher than LARGE.
    """
    table = spike_table(series, protocol).sort_values("height").drop_duplicates(side, keep="last")
    table = table[table[side] > protocol.ignore_steps].sort_values(side)
    at, rms_at = table[side].to_numpy(), rms_spikes(series.rms_of(TENSOR), protocol)
    rms_at = np.flatnonzero(rms_at) + 1
    since, until = leads(at + 1, rms_at) - 1, leads(-at, -rms_at[::-1])
    lead = np.where(since <= protocol.max_lead, since, -until)
    lead = np.where(np.abs(lead) <= protocol.max_lead, lead, np.nan)
    return pd.DataFrame({"lead": lead + 0.0, "is_large": (table["height"] > LARGE).to_numpy()})


def count_following(series: Series, rms: np.ndarray, protocol: Protocol) -> dict[str, float]:
    """The fields of `LagCoincidence`, and `num_onsets`, `num_by_onset` and `p_by_onset`.

    `rms` is RMS_t [steps] of one tensor. The last three are counted from the onset, where spikes
    that share one count once.
    """
    loss_marks, onset = marks_and_onsets(series, protocol)
    rms_marks, onset_marks = rms_spikes(rms, protocol), np.zeros_like(loss_marks)
    onset_marks[onset - 1] = True
    by_step = lag_coincidence(loss_marks, rms_marks, protocol)
    by_onset = lag_coincidence(onset_marks, rms_marks, protocol)
    more = {"num_onsets": by_onset.num_loss_spikes, "num_by_onset": by_onset.num_following}
    more["p_by_onset"] = by_onset.p_value
    return {**by_step._asdict(), **more}


def lead_table(series: Series, protocol: Protocol) -> pd.DataFrame:
    """One row per tensor, the most followed first: `count_following`."""
    rows = [
        {"tensor": name, **count_following(series, series.rms[name].to_numpy(float), protocol)}
        for name in series.rms
    ]
    rows.sort(key=lambda row: (-row["num_following"], row["p_value"]))
    return pd.DataFrame(rows)


def describe_protocols(frame: pd.DataFrame) -> str:
    """What counts as a spike in a frame that has the columns THRESHOLDS, compared to the paper."""
    rows = frame[list(THRESHOLDS)].drop_duplicates().to_dict("records")
    used = [Protocol(**row) for row in rows]
    ignored: dict[str, set[int]] = {}
    for p in used:
        rule = (
            f"RMS spikes: RMS_t >= {p.rms_threshold:g}. Loss spikes: {p.num_deviations} losses "
            f"within {p.within} steps above the mean + {p.loss_sigmas:g} standard deviations of "
            f"the {p.window} steps before."
        )
        ignored.setdefault(rule, set()).add(p.ignore_steps)
    texts = [
        f"{rule} The first {' or '.join(f'{n:,}' for n in sorted(steps))} steps have neither."
        for rule, steps in ignored.items()
    ]
    paper = asdict(PROTOCOLS["paper"])
    changed = sorted({k for p in used for k, v in asdict(p).items() if v != paper[k]} - {"window"})
    note = " The paper names no window."
    if changed:
        note = f" As in the paper but for {', '.join(changed)}.{note}"
    return " Other runs: ".join(texts) + note

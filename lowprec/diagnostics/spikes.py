"""Loss spikes and RMS spikes: when they begin, and how often loss spikes follow RMS spikes.

Element i of a series belongs to step i + 1. NaN, infinite and unrecorded values exceed nothing and
enter no statistic (except that an infinite RMS_t exceeds its threshold). Lengths are in steps, that
is, optimizer updates. `Detector` defines what a spike is; `loss_spikes` and `rms_spikes` feed it a
whole series. Nothing here imports torch.
Source: RMS and loss spikes, appendix D, arXiv:2304.13013.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

ROUNDING = 1e-6  # a constant float32 loss scatters by at most this share of its mean
NEAR_CHANCE = 0.02  # share of ln(batch size) by which a collapsed model's loss scatters
COLLAPSED = 50  # steps
AT_CHANCE, LAST_STEPS = 0.005, 20  # share and steps for the end of a run
LEARNED = 0.1  # share of ln(batch size) by which the loss of a model that has learned is lower
ONSET_WINDOW = 50  # steps
ONSET_DEVIATIONS = 3.0  # median absolute deviations of the differences
# bounds of a Protocol, which are those of the config group `diagnostics.spikes`
LEAST = {"num_deviations": 1, "within": 1, "ignore_steps": 0, "window": 2, "max_lead": 1}
MAX_WINDOW = 4096  # a detector takes window^2 numbers


@dataclass(frozen=True)
class Protocol:
    """What counts as a spike. The defaults are the paper's; it leaves `window` open.

    A loss is an *outlier* if it exceeds mean + `loss_sigmas` standard deviations of the `window`
    steps before it, at least half of which have a finite loss. Later windows contain the bound it
    exceeded instead: a spike raises the bound only a little, yet a loss that stays high is normal
    again within about a window. A loss spike begins at the first of `num_deviations` outliers, the
    last of which comes at most `within` steps after the first. An RMS spike is a step with RMS_t >=
    `rms_threshold`. The first `ignore_steps` steps have neither. A spike at most `within` steps
    after the previous one (counted or not) is the same spike and does not count again. A loss spike
    follows an RMS spike if it begins 1 to `max_lead` steps after it. ValueError for a number that
    is out of bounds, such as `window` above 4096.
    """

    rms_threshold: float = 2.3
    loss_sigmas: float = 3.2
    num_deviations: int = 2
    within: int = 10
    ignore_steps: int = 1000
    window: int = 200
    max_lead: int = 8

    def __post_init__(self):
        for name in ("rms_threshold", "loss_sigmas"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a finite number above 0")
        for name, least in LEAST.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")
        if self.window > MAX_WINDOW:
            raise ValueError(f"window={self.window}: must be at most {MAX_WINDOW}")


PROTOCOLS = {
    "paper": Protocol(),
    # OLMo-core's SkipStepOptimizer, which lets outliers enter its window as they are
    "sigma": Protocol(loss_sigmas=6.0, num_deviations=1, window=128, ignore_steps=0),
}


def protocol_of(protocol: str, warmup_steps: int, **thresholds: float | None) -> Protocol:
    """The protocol of the config group `diagnostics.spikes`; "none" stands for "paper".

    `thresholds` replace the protocol's own; None keeps it, except that no more than the warmup is
    ignored: the paper ignores 1,000 of 20,000 steps, 5,000 of which are warmup.
    """
    own = PROTOCOLS.get(protocol, PROTOCOLS["paper"])
    changed = {name: value for name, value in thresholds.items() if value is not None}
    return replace(own, **{"ignore_steps": min(own.ignore_steps, warmup_steps), **changed})


class Spike(NamedTuple):
    """A spike's step, its tensor's index (None for a loss spike), and the loss or RMS_t there."""

    step: int
    tensor: int | None
    value: float


class Collapse:
    """Detects a model that tells no pairs apart: its loss stays at chance, ln(batch_size).

    The loss may be at chance level in the first `warmup_steps` of the `num_steps`. `verdict` is
    `collapsed` if an earlier loss was lower than chance by LEARNED, and else `not_learning`.
    """

    def __init__(self, batch_size: int, warmup_steps: int, num_steps: int):
        self.chance = math.log(batch_size)
        self.warmup_steps, self.num_steps = warmup_steps, num_steps
        self.verdict = "not_learning"
        self._near = self._at = 0  # steps in a row

    def feed(self, step: int, loss: float) -> str:
        """A sentence at the COLLAPSED-th step in a row within NEAR_CHANCE of chance, else "".

        At the last step of a run, LAST_STEPS in a row within AT_CHANCE are enough.
        """
        if loss < (1 - LEARNED) * self.chance:
            self.verdict = "collapsed"
        distance = abs(loss - self.chance) if step > self.warmup_steps else math.inf
        self._near = self._near + 1 if distance <= NEAR_CHANCE * self.chance else 0
        self._at = self._at + 1 if distance <= AT_CHANCE * self.chance else 0
        ends = step == self.num_steps and self._at >= LAST_STEPS and self._near < COLLAPSED
        if self._near != COLLAPSED and not ends:
            return ""
        if self.verdict == "not_learning":
            return f"the loss has not left chance level, {self.chance:.3g}"
        first = step - self._near + 1
        return f"the loss has been at chance level, {self.chance:.3g}, since step {first}"


class Detector:
    """Finds the spikes of a run whose steps arrive in pieces, however they are cut."""

    def __init__(self, protocol: Protocol, num_tensors: int = 0):
        self.protocol = protocol
        self.step = 0
        self._window = np.full(protocol.window, np.nan)
        self._outliers = np.empty((0, 2))  # [n, (step, loss)]: the last num_deviations - 1
        self._last_loss_spike = np.array(-np.inf)  # step, counted or not
        self._last_rms_spike = np.full(num_tensors, -np.inf)

    def feed(
        self, steps: np.ndarray, loss: np.ndarray, rms: np.ndarray | None = None
    ) -> list[Spike]:
        """Returns the spikes that become known at the next `steps` [n], in the order of these.

        A loss spike becomes known at the last outlier it needs, up to `within` steps after its own
        step. Steps that are left out count as unrecorded; ValueError if a step is not after the
        previous one. `loss` is [n], `rms` [n, tensors].
        """
        steps, loss = np.asarray(steps, dtype=np.int64), np.asarray(loss, dtype=np.float64)
        if not len(steps):
            return []
        ahead = np.diff(steps, prepend=self.step)
        if (ahead <= 0).any():
            late = int(np.argmax(ahead <= 0))
            raise ValueError(f"step {steps[late]} after step {steps[late] - ahead[late]}")
        self.step = int(steps[-1])
        known = self._loss_spikes(steps, ahead, loss)
        if rms is not None:
            for n, i in np.argwhere(self._mark_rms(steps, np.asarray(rms, dtype=np.float64))):
                known.append((steps[n], Spike(int(steps[n]), int(i), float(rms[n][i]))))
        return [spike for _, spike in sorted(known, key=lambda pair: pair[0])]

    def _loss_spikes(self, steps: np.ndarray, ahead: np.ndarray, loss: np.ndarray) -> list:
        """Each new loss spike after the step at which it becomes known."""
        at = np.minimum(ahead, self.protocol.window + 1).cumsum() - 1  # a longer gap is the same
        filled = np.full(at[-1] + 1, np.nan)
        filled[at] = loss
        bounds, self._window = loss_bounds(filled, self.protocol, self._window)
        is_outlier = np.isfinite(loss) & (loss > bounds[at]) & (steps > self.protocol.ignore_steps)
        new = np.stack([steps, loss], axis=1)[is_outlier]
        outliers, others = np.concatenate([self._outliers, new]), self.protocol.num_deviations - 1
        count = max(0, len(outliers) - others)
        self._outliers = outliers[count:]
        first, last = outliers[:count], outliers[others:, 0]
        is_spike = last - first[:, 0] <= self.protocol.within
        is_new, self._last_loss_spike = _count_once(
            is_spike, first[:, 0], self._last_loss_spike, self.protocol.within
        )
        spikes = [Spike(int(step), None, float(value)) for step, value in first[is_new]]
        return list(zip(last[is_new], spikes, strict=True))

    def _mark_rms(self, steps: np.ndarray, rms: np.ndarray) -> np.ndarray:
        """Bool [n, tensors]: where an RMS spike begins."""
        is_due = steps > self.protocol.ignore_steps
        exceeds = (rms >= self.protocol.rms_threshold) & is_due[:, None]
        is_new, self._last_rms_spike = _count_once(
            exceeds, steps[:, None], self._last_rms_spike, self.protocol.within
        )
        return is_new


def spike_events(spikes: Sequence[Spike], names: Sequence[str]) -> list[dict]:
    """Rows of events.jsonl for consecutive spikes of a Detector; `names` are the tensors'.

    {"step", "spike": "loss", "loss"}, or {"step", "spike": "rms", "rms": {tensor: RMS_t, ...}} for
    all RMS spikes of a step.
    """
    events = []
    for (step, is_loss), group in groupby(spikes, lambda s: (s.step, s.tensor is None)):
        if is_loss:
            events.append({"step": step, "spike": "loss", "loss": next(group).value})
        else:
            by_tensor = {names[spike.tensor]: spike.value for spike in group}
            events.append({"step": step, "spike": "rms", "rms": by_tensor})
    return events


def loss_spikes(loss: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Bool [steps]: the steps at which a loss spike begins. `loss` is [steps]."""
    spikes = Detector(protocol).feed(np.arange(len(loss)) + 1, loss)
    return np.isin(np.arange(len(loss)) + 1, [spike.step for spike in spikes])


def rms_spikes(rms: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Bool, shaped as `rms` [steps] or [steps, tensors]: the steps at which an RMS spike begins."""
    rms = np.asarray(rms, dtype=np.float64)
    columns = rms[:, None] if rms.ndim == 1 else rms
    detector = Detector(protocol, columns.shape[1])
    return detector._mark_rms(np.arange(len(rms)) + 1, columns).reshape(rms.shape)


def onsets(loss: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Onsets of loss spikes: detection needs an outlier, but the loss may begin to rise earlier.

    The onset is the first step of the unbroken stretch of raised losses that ends at the detected
    step, or that step if it is not raised. A loss is raised if it exceeds the median of the
    `ONSET_WINDOW` steps before it, at least half of which are finite, by `ONSET_DEVIATIONS`
    median absolute deviations (MAD) of the differences between neighbors in that window.
    Differences ignore a trend; for white noise 3 of their MADs are 2.9 standard deviations.

    `loss` is [steps]; `steps` counts from 1, as `np.flatnonzero(loss_spikes(...)) + 1`. Returns
    int64, shaped as `steps`.
    """
    loss = np.asarray(loss, dtype=np.float64)
    loss = np.where(np.isfinite(loss), loss, np.nan)
    earliest = []
    for step in np.asarray(steps, dtype=int):
        onset = step + 1
        while _is_raised(loss, onset - 1):
            onset -= 1
        earliest.append(min(onset, step))
    return np.array(earliest, dtype=np.int64)


def _is_raised(loss: np.ndarray, step: int) -> bool:
    window = loss[max(0, step - 1 - ONSET_WINDOW) : max(0, step - 1)]
    if 2 * np.count_nonzero(~np.isnan(window)) < ONSET_WINDOW:
        return False
    median = np.nanmedian(window)
    differences = np.diff(window)
    differences = differences[~np.isnan(differences)]
    spread = 0.0
    if len(differences):
        spread = np.median(np.abs(differences - np.median(differences)))
    return bool(loss[step - 1] > median + max(ONSET_DEVIATIONS * spread, ROUNDING * np.abs(median)))


def largest_rms(beta2: float | np.ndarray) -> float | np.ndarray:
    """The largest possible RMS_t, 1 / sqrt(1 - beta2), as u_t >= (1 - beta2) g_t^2.

    A threshold above it cannot be reached: 2.3 needs beta2 >= 0.811.
    """
    return 1 / np.sqrt(1 - np.asarray(beta2, dtype=np.float64))


def relative_rms(rms: np.ndarray, beta2: float | np.ndarray) -> np.ndarray:
    """Rho = RMS_t sqrt(1 - beta2), from 0 to 1: comparable between runs of different beta2.

    `rms` is [steps] or [steps, tensors]; `beta2` is a number or [steps].
    """
    rms, scale = np.asarray(rms, dtype=np.float64), largest_rms(beta2)
    return rms / (scale[:, None] if rms.ndim == 2 and scale.ndim == 1 else scale)


def loss_bounds(
    loss: np.ndarray, protocol: Protocol, before: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """[steps]: the bound that an outlier at each step must exceed, NaN if there is none.

    Also returns the window after the last step, which the next call takes as `before`.
    """
    window, start, bounds = protocol.window, 0, np.full(len(loss), np.nan)
    before = np.full(window, np.nan) if before is None else before
    padded = np.concatenate([before, np.where(np.isfinite(loss), loss, np.nan)])
    while start < len(loss):
        windows = sliding_window_view(padded[start : start + 2 * window - 1], window)
        part = slice(start, start + window)
        bounds[part] = _bounds(windows[: len(bounds[part])], protocol)
        above = np.flatnonzero(padded[window:][part] > bounds[part])
        if len(above):  # its bound takes its place in the windows of the next steps
            padded[window + start + above[0]] = bounds[start + above[0]]
        start += above[0] + 1 if len(above) else window
    return bounds, padded[-window:]


def _bounds(windows: np.ndarray, protocol: Protocol) -> np.ndarray:
    """[n]: the bounds for the steps after windows [n, window]."""
    is_number = ~np.isnan(windows)
    count = is_number.sum(axis=1)
    mean = np.where(is_number, windows, 0.0).sum(axis=1) / np.maximum(count, 1)
    squares = (np.where(is_number, windows - mean[:, None], 0.0) ** 2).sum(axis=1)
    deviation = np.sqrt(squares / np.maximum(count, 1))
    bounds = mean + protocol.loss_sigmas * np.maximum(deviation, ROUNDING * np.abs(mean))
    return np.where(2 * count >= protocol.window, bounds, np.nan)


def _count_once(
    marks: np.ndarray, steps: np.ndarray, last: np.ndarray, within: int
) -> tuple[np.ndarray, np.ndarray]:
    """The marks [n, ...] that have no other mark in the `within` steps before, and the last mark.

    `last` [...] is the last marked step before these; -inf if there is none.
    """
    latest = np.concatenate([last[None], np.where(marks, steps, -np.inf)])
    latest = np.maximum.accumulate(latest, axis=0)
    return marks & (steps - latest[:-1] > within), latest[-1]


class LagCoincidence(NamedTuple):
    """How often loss spikes follow RMS spikes, and how often they would by chance.

    Numbers from `share` on are NaN if there is no loss spike.
    """

    num_loss_spikes: int
    num_rms_spikes: int
    num_following: int
    share: float  # num_following / num_loss_spikes
    chance: float  # the mean share over the shifts of `lag_coincidence`
    low: float  # of the central 95% of these shares; NaN if their mean is outside: few spikes
    high: float
    p_value: float  # fraction of shifts under which at least as many loss spikes follow


def leads(loss_steps: np.ndarray, rms_steps: np.ndarray) -> np.ndarray:
    """Steps from the latest RMS spike before each loss spike to it; NaN if there is none.

    `rms_steps` is sorted. An RMS spike at the loss spike's own step is not before it.
    """
    before = np.searchsorted(rms_steps, loss_steps, side="left")
    return np.asarray(loss_steps, float) - np.concatenate([[np.nan], rms_steps])[before]


def lag_coincidence(
    loss_marks: np.ndarray, rms_marks: np.ndarray, protocol: Protocol
) -> LagCoincidence:
    """Counts the loss spikes that follow RMS spikes of one tensor, and those expected by chance.

    `loss_marks` and `rms_marks`, bool [steps], mark the steps at which spikes begin. For chance,
    the RMS spikes are shifted circularly along the steps after `ignore_steps`: each keeps its
    neighbors and loses only its relation to the loss. The shift by 0 is included, so `p_value` is
    above 0. Where both kinds of spike cluster in one phase of training, chance is underestimated.
    """
    loss_marks, rms_marks = loss_marks[protocol.ignore_steps :], rms_marks[protocol.ignore_steps :]
    loss_steps, rms_steps = np.flatnonzero(loss_marks), np.flatnonzero(rms_marks)
    num_loss, num_rms = len(loss_steps), len(rms_steps)
    if not num_loss:
        return LagCoincidence(0, num_rms, 0, *[math.nan] * 5)
    num_following = int((leads(loss_steps, rms_steps) <= protocol.max_lead).sum())
    is_after = np.zeros(len(loss_marks), dtype=bool)
    for lead in range(1, protocol.max_lead + 1):
        is_after |= np.roll(rms_marks, lead)
    shifts = np.arange(len(loss_marks))
    counts = sum(is_after[(step - shifts) % len(is_after)].astype(int) for step in loss_steps)
    low, high = np.quantile(counts / num_loss, (0.025, 0.975), method="inverted_cdf")
    p_value = float((counts >= num_following).mean())
    chance = float(counts.mean() / num_loss)
    if not low <= chance <= high:  # with one loss spike, shares and their quantiles are 0 or 1
        low = high = math.nan
    shares = num_following / num_loss, chance, float(low), float(high)
    return LagCoincidence(num_loss, num_rms, num_following, *shares, p_value)

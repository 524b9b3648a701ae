"""Loss spikes and RMS spikes: which steps they are, and how often the first follow the second.

A series has element i for step i + 1. A value that is NaN or infinite and a step that was not
recorded (NaN) are no number: they exceed nothing and enter no statistic (an RMS of inf exceeds).
All thresholds are fields of `Protocol`. Lengths are in steps, that is optimizer updates. `Detector`
defines what a spike is; `loss_spikes` and `rms_spikes` find the same ones in whole series, faster.
Source: RMS and loss spikes, appendix D, arXiv:2304.13013.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

ROUNDING = 1e-6  # of the mean: a float32 loss that stands still scatters no more than this


@dataclass(frozen=True)
class Protocol:
    """What counts as a spike. The defaults are the paper's, but for `window`, which it leaves open.

    A loss *deviates* if it exceeds mean + `loss_sigmas` standard deviations of the `window` steps
    before it, where a loss that deviated counts as the bound that it exceeded: a spike lifts the
    bound of later steps only a little, yet a loss that stays high is normal again within about a
    window. No step deviates while fewer than half of those steps have a number.
    A loss spike is a deviation that begins `num_deviations` of them, the last at most `within`
    steps after the first. An RMS spike is a step with RMS_t >= `rms_threshold`. The first
    `ignore_steps` steps have neither. A spike at most `within` steps after one before it (counted
    or not) is the same spike, so each counts once, at its earliest step.
    A loss spike follows an RMS spike if it comes 1 to `max_lead` steps after one.
    """

    rms_threshold: float = 2.3
    loss_sigmas: float = 3.2
    num_deviations: int = 2
    within: int = 10
    ignore_steps: int = 1000
    window: int = 200
    max_lead: int = 8


PROTOCOLS = {
    "paper": Protocol(),
    # of OLMo-core's SkipStepOptimizer, which lets high losses into its window as they are
    "sigma": Protocol(loss_sigmas=6.0, num_deviations=1, window=128, ignore_steps=0),
}


def protocol_of(protocol: str, **thresholds: float | None) -> Protocol:
    """That of `diagnostics.spikes`: a name, "none" stands for "paper", and what is given of it."""
    given = {name: value for name, value in thresholds.items() if value is not None}
    return replace(PROTOCOLS.get(protocol, PROTOCOLS["paper"]), **given)


class Spike(NamedTuple):
    """A spike: its step, its tensor's index (None: a loss spike), the loss or RMS_t there."""

    step: int
    tensor: int | None
    value: float


class Detector:
    """Finds spikes step by step; a resumed run feeds it the steps before again.

    What it has found after some steps does not depend on later ones. A step costs a pass over the
    window and one over the tensors.
    """

    def __init__(self, protocol: Protocol, num_tensors: int):
        self.protocol = protocol
        self.step = 0
        self._window = np.full(protocol.window, np.nan)
        self._deviations: deque[tuple[int, float]] = deque(maxlen=protocol.num_deviations)
        self._candidate = -math.inf  # step of the last loss spike, counted or not
        self._exceeded = np.full(num_tensors, -math.inf)  # the same of each tensor

    def feed(self, step: int, loss: float, rms: np.ndarray | None = None) -> list[Spike]:
        """The spikes that this step makes known, the earlier first.

        A loss spike is known at its last deviation needed, up to `within` steps after its own step.

        Args:
            step: later than the one before; steps left out count as not recorded.
            loss: of the step.
            rms: [tensors], RMS_t; None where it is not recorded.
        """
        if step <= self.step:
            raise ValueError(f"step {step} after step {self.step}")
        for _ in range(min(step - self.step - 1, self.protocol.window)):
            self._push(math.nan)
        self.step = step
        bound = _bound_after(self._window, self.protocol)
        found = []
        if math.isfinite(loss) and loss > bound:
            if step > self.protocol.ignore_steps:
                found = self._deviates(step, loss)
            loss = bound
        self._push(loss if math.isfinite(loss) else math.nan)
        if rms is None or step <= self.protocol.ignore_steps:
            return found
        rms = np.asarray(rms, dtype=np.float64)
        exceeds = rms >= self.protocol.rms_threshold
        if exceeds.any():
            new = exceeds & (step - self._exceeded > self.protocol.within)
            self._exceeded[exceeds] = step
            found += [Spike(step, int(i), float(rms[i])) for i in np.flatnonzero(new)]
        return found

    def _push(self, loss: float) -> None:
        self._window[:-1] = self._window[1:]
        self._window[-1] = loss

    def _deviates(self, step: int, loss: float) -> list[Spike]:
        self._deviations.append((step, loss))
        first, value = self._deviations[0]
        enough = len(self._deviations) == self.protocol.num_deviations
        if not enough or step - first > self.protocol.within:
            return []
        is_new = first - self._candidate > self.protocol.within
        self._candidate = first
        return [Spike(first, None, value)] if is_new else []


def loss_spikes(loss: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Bool [steps]: the steps at which a loss spike begins. `loss` is [steps]."""
    loss = np.asarray(loss, dtype=np.float64)
    deviates = np.isfinite(loss) & (loss > loss_bounds(loss, protocol))
    deviates[: protocol.ignore_steps] = False
    steps = np.flatnonzero(deviates)
    first = steps[: max(0, len(steps) - protocol.num_deviations + 1)]
    last = steps[protocol.num_deviations - 1 :]
    candidates = np.zeros(len(loss), dtype=bool)
    candidates[first[last - first <= protocol.within]] = True
    return _count_once(candidates, protocol.within)


def rms_spikes(rms: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Bool, as `rms` [steps] or [steps, tensors]: the steps at which an RMS spike begins."""
    exceeds = np.asarray(rms, dtype=np.float64) >= protocol.rms_threshold
    exceeds[: protocol.ignore_steps] = False
    return _count_once(exceeds, protocol.within)


def loss_bounds(loss: np.ndarray, protocol: Protocol) -> np.ndarray:
    """[steps]: what the loss of each step must exceed to deviate; NaN while there is no bound."""
    loss = np.asarray(loss, dtype=np.float64)
    counted, window = np.where(np.isfinite(loss), loss, np.nan), protocol.window
    padded = np.concatenate([np.full(window, np.nan), counted])
    bounds = _bounds(padded, protocol)
    start = 0
    while len(above := np.flatnonzero(padded[window + start :] > bounds[start:])):
        i = start + above[0]
        padded[window + i] = bounds[i]
        start = i + 1  # the changed loss is in the windows of the next `window` steps alone
        bounds[start : start + window] = _bounds(padded[start : start + 2 * window], protocol)
    return bounds


def _bounds(padded: np.ndarray, protocol: Protocol) -> np.ndarray:
    """`_bound_after` of each stretch of `window` elements that has one after it."""
    num = max(0, len(padded) - protocol.window)
    is_number = ~np.isnan(padded)
    total, squares, count = np.zeros(num), np.zeros(num), np.zeros(num)
    values = np.where(is_number, padded, 0.0)
    for i in range(protocol.window):
        total += values[i : i + num]
        count += is_number[i : i + num]
    mean = total / np.maximum(count, 1)
    for i in range(protocol.window):
        squares += np.where(is_number[i : i + num], values[i : i + num] - mean, 0.0) ** 2
    deviation = np.sqrt(squares / np.maximum(count, 1))
    bounds = mean + protocol.loss_sigmas * np.maximum(deviation, ROUNDING * np.abs(mean))
    return np.where(2 * count >= protocol.window, bounds, np.nan)


def _bound_after(window: np.ndarray, protocol: Protocol) -> float:
    """The bound of the step after a window; NaN if too few of its elements are numbers.

    Adds from first to last, as `_bounds` does: the same bits.
    """
    is_number = ~np.isnan(window)
    count = float(is_number.sum())
    if 2 * count < len(window):
        return math.nan
    mean = np.cumsum(np.where(is_number, window, 0.0))[-1] / count
    squares = np.cumsum(np.where(is_number, window - mean, 0.0) ** 2)[-1]
    deviation = max(np.sqrt(squares / count), ROUNDING * abs(mean))
    return float(mean + protocol.loss_sigmas * deviation)


def _count_once(marks: np.ndarray, within: int) -> np.ndarray:
    """The marks along the first axis that have no other in the `within` steps before them."""
    numbers = np.arange(1.0, len(marks) + 1).reshape(-1, *[1] * (marks.ndim - 1))
    last = np.maximum.accumulate(np.where(marks, numbers, -np.inf), axis=0)
    before = np.concatenate([np.full_like(last[:1], -np.inf), last[:-1]])
    return marks & (numbers - before > within)


class Following(NamedTuple):
    """How often loss spikes follow RMS spikes, and how often they would by chance.

    `share` = `num_following` / `num_loss_spikes`; `chance`: its mean, `low` to `high` its central
    95%, under the shifts of `following`; `p_value`: the share of shifts under which at least as
    many follow. All NaN without a loss spike.
    """

    num_loss_spikes: int
    num_rms_spikes: int
    num_following: int
    share: float
    chance: float
    low: float
    high: float
    p_value: float


def leads(loss_steps: np.ndarray, rms_steps: np.ndarray) -> np.ndarray:
    """Steps from the latest RMS spike before each loss spike to it; NaN where there is none.

    Both are steps in order. An RMS spike at the loss spike's own step is not before it.
    """
    before = np.searchsorted(rms_steps, loss_steps, side="left")
    return np.asarray(loss_steps, float) - np.concatenate([[np.nan], rms_steps])[before]


def following(
    loss_marks: np.ndarray,
    rms_marks: np.ndarray,
    protocol: Protocol,
    max_shift: int | None = None,
) -> Following:
    """The loss spikes that follow RMS spikes of one tensor; both are bool [steps], spikes' starts.

    Chance: the RMS spikes are shifted along the steps after `ignore_steps`, the end joined to the
    beginning, by every number of steps there is (each keeps its neighbors, only the relation to
    the loss is lost), or by at most `max_shift` either way. The latter also keeps the phase of
    training: where both kinds of spike crowd into one phase, shifts over the whole run make chance
    look too small. The shift by 0 is one of them, so `p_value` is above 0.
    """
    loss_marks, rms_marks = loss_marks[protocol.ignore_steps :], rms_marks[protocol.ignore_steps :]
    loss_steps, rms_steps = np.flatnonzero(loss_marks), np.flatnonzero(rms_marks)
    num_loss, num_rms = len(loss_steps), len(rms_steps)
    if not num_loss:
        return Following(0, num_rms, 0, *[math.nan] * 5)
    num_following = int((leads(loss_steps, rms_steps) <= protocol.max_lead).sum())
    is_after = np.zeros(len(loss_marks), dtype=bool)
    for lead in range(1, protocol.max_lead + 1):
        is_after |= np.roll(rms_marks, lead)
    shifts = np.arange(len(loss_marks))
    if max_shift is not None and 2 * max_shift + 1 < len(loss_marks):
        shifts = np.arange(-max_shift, max_shift + 1)
    counts = sum(is_after[(step - shifts) % len(is_after)].astype(int) for step in loss_steps)
    low, high = np.quantile(counts / num_loss, (0.025, 0.975), method="inverted_cdf")
    p_value = float((counts >= num_following).mean())
    shares = (num_following / num_loss, float(counts.mean() / num_loss), float(low), float(high))
    return Following(num_loss, num_rms, num_following, *shares, p_value)

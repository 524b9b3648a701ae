"""Overrides of a command line, such as `seed=0`, in Hydra's grammar."""

import contextlib
import shlex
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

QUOTES = "\"'"


def key_of(text: str) -> str:
    """The key of an override as it is written, without `++`."""
    return text.partition("=")[0].lstrip("+")


def plain_values(overrides: list[str]) -> dict[str, str]:
    """The value of each override by its key, without the quotes in which Hydra reads it."""
    values = {}
    for text in overrides:
        written = text.partition("=")[2]
        override = parse_or_fault(text, [])
        value = None if override is None or override.is_sweep_override() else override.value()
        is_plain = type(value) in (str, int)
        values[key_of(text)] = str(value) if is_plain else written
    return values


@cache
def parse(text: str) -> Override:
    """An override in Hydra's terms; raises HydraException, RecursionError or ValueError."""
    return OverridesParser.create().parse_override(text)


def parse_or_fault(text: str, faults: list[str]) -> Override | None:
    """The same; None, and a fault, if it cannot be parsed or could call something."""
    key, sign, value = text.partition("=")
    of_hydra = key.lstrip("+").startswith("hydra")
    if not key or "@" in key or not (sign or key.startswith("~")):
        faults.append(f"{text}: key=value is expected")
    elif "_target_" in text or (of_hydra and "()" in text):
        faults.append(f"{key}: _target_ and () are not allowed; a config is data and calls nothing")
    else:
        try:
            return parse(text)
        except (HydraException, RecursionError, ValueError):  # also nested or long without end
            advice = f"quote special characters: {quoted(key, value[:200])}"
            with contextlib.suppress(HydraException, RecursionError, ValueError):
                bare = f"{key}={value.translate({ord(quote): None for quote in QUOTES})}"
                if value.startswith("{") and parse(bare):
                    advice = f"names in a map have no quotes: {shlex.quote(bare)}"
            faults.append(f"{text[:200]}: cannot be parsed; {advice}")
    return None


def single_faults(overrides: list[str]) -> list[str]:
    """A fault for each list of values, for a command without -m."""
    lists = [
        o for o in overrides if (parsed := parse_or_fault(o, [])) and parsed.is_sweep_override()
    ]
    parts = [text.partition("=") for text in lists]
    return [f"{k}={v}: one value is expected, in quotes: {quoted(k, v)}" for k, _, v in parts]


def quoted(key: str, value: str) -> str:
    """An override whose value is text, as it is written in a shell."""
    inner = value.replace('"', '\\"')
    return shlex.quote(f'{key}="{inner}"')

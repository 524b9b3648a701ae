"""Importing this under `python -m` turns two errors of our commands into one line each.

Also sets OMP_WAIT_POLICY=passive, because spinning OpenMP threads make training much slower on a
busy CPU.
"""

import os
import sys
from types import TracebackType

OWN = ("lowprec", "analysis", "experiments")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported


def _print(kind: type, error: BaseException, traceback: TracebackType | None) -> None:
    """Prints Ctrl-C and a missing package without a traceback, other errors with it."""
    package = str(getattr(error, "name", None) or "").partition(".")[0]
    if issubclass(kind, KeyboardInterrupt):
        print(f"\n{str(error) or 'Interrupted.'}", file=sys.stderr)
    elif issubclass(kind, ModuleNotFoundError) and package not in ("", *OWN):
        hint = "source .venv/bin/activate, or pip install -e '.[harness]'"
        print(f"needs {package}, which is not installed: {hint}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


if sys.argv[:1] == ["-m"]:  # the package of the command is being imported
    if any(word.partition(".")[0] in OWN for word in sys.orig_argv):
        sys.excepthook = _print

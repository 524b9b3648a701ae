"""Shared by the commands: a user's mistake prints one line, and few warnings are shown."""

import functools
import signal
import sys
import warnings
from collections.abc import Callable

from analysis.load import NoRunsError

Main = Callable[[list[str] | None], int]


class ChoiceError(ValueError):
    """A choice that does not exist or is ambiguous; the message lists the valid ones."""


def entry(main: Main) -> Main:
    """Wraps a command: it prints a user's mistake as one line and returns status 2."""

    @functools.wraps(main)
    def answer(arguments: list[str] | None = None) -> int:
        try:
            return main(arguments)
        except (NoRunsError, ChoiceError) as error:
            print(f"error: {error}", file=sys.stderr)
        except (FileExistsError, NotADirectoryError) as error:
            print(f"error: {error.filename} is not a folder", file=sys.stderr)
        return 2

    return answer


def run(main: Main) -> None:
    """Runs a command as the program, with warnings only about damaged files."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message=".*left out")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly under `| head`
    sys.exit(main())

"""What the commands of this room share: a caller's mistake is one line, few warnings are shown."""

import functools
import os
import sys
import warnings
from collections.abc import Callable

from analysis.load import NoRunsError

Main = Callable[[list[str] | None], int]


class ChoiceError(ValueError):
    """What was asked for does not exist or is ambiguous; the message says what there is."""


def entry(main: Main) -> Main:
    """A command that prints a caller's mistake as one line and returns 2, its exit status."""

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
    """Runs a command as the program. Of all warnings it shows those of damaged files."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message=".*left out")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)

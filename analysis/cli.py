"""Shared by the commands: a user's mistake prints one line, and few warnings are shown."""

import argparse
import functools
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any, NoReturn

from analysis.load import NoRunsError
from lowprec.nearest import nearest
from lowprec.waiting import Waiting

Main = Callable[[list[str] | None], int]


class ChoiceError(ValueError):
    """A choice that does not exist or is ambiguous; the message lists the valid ones."""


class Parser(argparse.ArgumentParser):
    """Parses flags; a mistake raises ChoiceError, with the nearest flag for an unknown one."""

    def parse_known_args(self, args: list[str] | None = None, namespace: Any = None) -> tuple:
        """Refuses unknown flags before required ones are missed."""
        args = sys.argv[1:] if args is None else args
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for flag in (text.partition("=")[0] for text in args if text.startswith("--")):
            if not any(known.startswith(flag) for known in flags):
                near = nearest(flag, flags)
                self.error(f"{flag}: no such flag; there are {', '.join(flags)}{near}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises ChoiceError instead of printing the usage."""
        raise ChoiceError(message)


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
        except OSError as error:
            named = f"{error.filename}: {error.strerror}" if error.filename else error
            print(f"error: {named}", file=sys.stderr)
        return 2

    return answer


def run(main: Main) -> None:
    """Runs a command as the program, which says what it is doing if that takes long.

    Warns only about what is damaged or not recorded.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message=".*(left out|did not record)")
        warnings.showwarning = lambda text, *_: print(f"warning: {text}", file=sys.stderr)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly under `| head`
    with closing(Waiting("reading runs")):
        sys.exit(main())

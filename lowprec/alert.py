"""Alerts: the command in the environment variable LOWPREC_ALERT is called with one sentence."""

import atexit
import contextlib
import os
import shlex
import shutil
import subprocess
import time

END_S = 5  # for the last commands: the end of this process may end its SLURM job
_started: list[subprocess.Popen] = []


def command() -> list[str]:
    """The words of LOWPREC_ALERT; none if it is not set.

    ValueError, without the text, which may hold a secret, if its first word is no executable here.
    """
    words = shlex.split(os.environ.get("LOWPREC_ALERT", ""))  # ValueError: a quote is open
    if words and shutil.which(words[0]) is None:
        raise ValueError("no such command")
    return words


def alert(text: str) -> None:
    """Starts the command with `text` as its last argument; cannot fail.

    Nothing waits for the command until this process ends, and then at most END_S seconds.
    """
    _started[:] = [process for process in _started if process.poll() is None]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    with contextlib.suppress(OSError, ValueError):
        if words := command():
            _started.append(subprocess.Popen([*words, text], start_new_session=True, **quiet))


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + END_S
    for process in _started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.returncode = 0  # it may outlive this process; subprocess would warn of that

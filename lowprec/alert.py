"""Alerts: the command in the environment variable LOWPREC_ALERT is called with one sentence."""

import contextlib
import os
import shlex
import shutil
import subprocess

IN_BACKGROUND = ["sh", "-c", '"$@" >/dev/null 2>&1 </dev/null &', "sh"]  # nobody waits for it


def command() -> list[str]:
    """The words of LOWPREC_ALERT; none if it is not set.

    ValueError, without the text, which may hold a secret, if its first word is no executable here.
    """
    words = shlex.split(os.environ.get("LOWPREC_ALERT", ""))  # ValueError: a quote is open
    if words and shutil.which(words[0]) is None:
        raise ValueError("no such command")
    return words


def alert(text: str) -> None:
    """Starts the command with `text` as its last argument; neither waits for it nor can fail."""
    with contextlib.suppress(OSError, ValueError):
        if words := command():
            subprocess.run([*IN_BACKGROUND, *words, text], start_new_session=True, check=False)

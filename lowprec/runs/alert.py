"""Tells the user about a run by the command in the environment variable LOWPREC_ALERT."""

import os
import shlex
import subprocess


def alert(text: str) -> None:
    """Starts the command, with `text` as its last argument, and does not wait for it.

    Only the environment names it: a config, a shard or a checkpoint never does.
    """
    try:
        command = shlex.split(os.environ.get("LOWPREC_ALERT", ""))
        if command:
            process = subprocess.Popen(
                [*command, text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            process.returncode = 0  # it may outlive this process; subprocess would warn of that
    except (OSError, ValueError) as error:
        print(f"warning: LOWPREC_ALERT: {error}")

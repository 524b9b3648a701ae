"""Tells the user by LOWPREC_ALERT: a command or an https webhook, from the environment only."""

import atexit
import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request

TIMEOUT_S = 10  # for a webhook to answer
END_S = 5  # for the last alerts to leave before the process ends, which may end its SLURM job
MOST = 2000  # characters that Discord accepts

_started: list[subprocess.Popen] = []


def alert(text: str) -> None:
    """Starts the command with `text` as its last argument, or posts it; does not wait for either.

    A webhook receives {"text": text, "content": text}, which Slack, Mattermost and Discord accept.
    It is tried once per alert; only the first failure in a process prints a warning.
    """
    target = os.environ.get("LOWPREC_ALERT", "")
    is_url = target.startswith("https://")
    try:
        command = [sys.executable, "-I", __file__] if is_url else shlex.split(target)
        if command:
            speaks = is_url and all(process.poll() == 0 for process in _started)
            process = subprocess.Popen(
                [*command, text],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if speaks else subprocess.DEVNULL,
                start_new_session=True,
            )
            _started.append(process)
    except (OSError, ValueError) as error:
        print(f"warning: LOWPREC_ALERT: {error}")


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + END_S
    for process in _started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.returncode = 0  # it may outlive this process; subprocess would warn of that


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_) -> None:
        """Makes a redirect an error: it would lose the text."""


def _post(url: str, text: str) -> None:
    """Posts a text once; exits with a message, which leaves out the secret URL, if that fails."""
    body = json.dumps({"text": text[:MOST], "content": text[:MOST]}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "lowprec"}
    try:
        request = urllib.request.Request(url, body, headers)
        urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S).close()
    except Exception as error:
        reason = getattr(error, "reason", type(error).__name__)
        status = f"status {error.code}, " if hasattr(error, "code") else ""
        sys.exit(f"warning: the webhook of LOWPREC_ALERT failed: {status}{reason}")


if __name__ == "__main__":
    _post(os.environ["LOWPREC_ALERT"], sys.argv[1])

"""Tells the user by LOWPREC_ALERT: a command or an https webhook, from the environment only."""

import atexit
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request

TIMEOUT_S = 10  # for a webhook to answer
END_S = 5  # for the last webhooks to answer before the process ends, which may end its SLURM job
MOST = 2000  # characters that Discord accepts

_started: list[subprocess.Popen] = []


def target() -> tuple[str, str]:
    """LOWPREC_ALERT, without blanks and quotes around a URL, and its scheme; "" for a command."""
    command = os.environ.get("LOWPREC_ALERT", "")
    url = command.strip(string.whitespace + "'\"")
    scheme, is_url, _ = url.partition("://")
    return (url, scheme.lower()) if is_url and scheme.isalpha() else (command, "")


def can_start(command: str) -> bool:
    """Whether the first word of a command, if it has one, is an executable here."""
    try:
        words = shlex.split(command)
    except ValueError:  # a quote is open
        return False
    return not words or shutil.which(words[0]) is not None


def alert(text: str) -> None:
    """Starts the command with `text` as its last argument, or posts it; does not wait for either.

    A webhook receives {"text": text, "content": text}, which Slack, Mattermost and Discord accept.
    It is tried once per alert; only the first failure in a process prints a warning.
    """
    _started[:] = [process for process in _started if process.poll() is None]
    command, scheme = target()
    is_url = scheme == "https"
    try:
        words = [sys.executable, "-I", __file__] if is_url else shlex.split(command)
        if words:
            process = subprocess.Popen(
                [*words, text],
                stdin=_first_failure() if is_url else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if is_url else subprocess.DEVNULL,
                start_new_session=True,
            )
            _started.append(process)
    except (OSError, ValueError) as error:  # the text of an OSError holds the command
        print(f"warning: LOWPREC_ALERT: {getattr(error, 'strerror', error)}")


@functools.cache
def _first_failure() -> int:
    """A pipe with one byte: the first webhook of this process that fails takes it and warns."""
    reader, writer = os.pipe()
    os.write(writer, b"1")
    os.close(writer)
    return reader


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + END_S * (target()[1] == "https")
    for process in _started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.returncode = 0  # it may outlive this process; subprocess would warn of that


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_) -> None:
        """Makes a redirect an error: it would lose the text."""


def _post(url: str, text: str) -> None:
    """Posts a text once; the first failure prints a warning, which leaves out the secret URL."""
    body = json.dumps({"text": text[:MOST], "content": text[:MOST]}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "lowprec"}
    signal.signal(signal.SIGALRM, _expire)
    signal.alarm(TIMEOUT_S)
    try:
        request = urllib.request.Request(url, body, headers)
        urllib.request.build_opener(_NoRedirect).open(request).close()
    except Exception as error:
        is_status = isinstance(error, urllib.error.HTTPError)
        reason = f"status {error.code}" if is_status else type(error.__context__ or error).__name__
        if os.read(sys.stdin.fileno(), 1):
            sys.exit(f"warning: the webhook of LOWPREC_ALERT failed: {reason}")


def _expire(*_) -> None:
    raise TimeoutError


if __name__ == "__main__":
    _post(target()[0], sys.argv[1])

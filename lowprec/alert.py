"""Tells the user by LOWPREC_ALERT: a command or an https webhook, from the environment only."""

import atexit
import json
import os
import shlex
import shutil
import string
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

TIMEOUT_S = 10  # for a webhook to answer
END_S = 5  # for the last webhooks to answer before the process ends, which may end its SLURM job
MOST = 2000  # characters that Discord accepts

_posts: list[threading.Thread] = []
_warning = threading.Lock()  # taken by the first post that fails


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
    command, scheme = target()
    try:
        if scheme == "https":
            _posts.append(threading.Thread(target=_post, args=(command, text), daemon=True))
            _posts[-1].start()
        elif words := shlex.split(command):
            nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
            process = subprocess.Popen([*words, text], start_new_session=True, **nowhere)
            threading.Thread(target=process.wait, daemon=True).start()
    except (OSError, ValueError) as error:  # the text of an OSError holds the command
        print(f"warning: LOWPREC_ALERT: {getattr(error, 'strerror', error)}")


@atexit.register
def _finish() -> None:
    deadline = time.monotonic() + END_S
    for post in _posts:
        post.join(max(0.0, deadline - time.monotonic()))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_) -> None:
        """Makes a redirect an error: it would lose the text."""


def _post(url: str, text: str) -> None:
    """Posts a text once; a warning leaves out the URL, which is a secret."""
    body = json.dumps({"text": text[:MOST], "content": text[:MOST]}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "lowprec"}
    try:
        request = urllib.request.Request(url, body, headers)
        urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S).close()
    except Exception as error:
        is_status = isinstance(error, urllib.error.HTTPError)
        reason = f"status {error.code}" if is_status else type(error.__context__ or error).__name__
        if _warning.acquire(blocking=False):
            print(f"warning: the webhook of LOWPREC_ALERT failed: {reason}", file=sys.stderr)

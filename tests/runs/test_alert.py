"""A webhook of LOWPREC_ALERT, with a real HTTPS server whose certificate only these tests trust."""

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lowprec import alert
from lowprec.config.check import ConfigError
from lowprec.train.preflight import preflight

CERTIFICATE = Path(__file__).with_name("localhost.pem")  # with its key
SCRIPT = """
import sys, time
from lowprec import alert
alert.END_S = float(sys.argv[1])
began = time.monotonic()
for text in sys.argv[2:]:
    alert.alert(text)
assert time.monotonic() - began < 1
"""


@pytest.fixture
def server():
    """A webhook at `url` that answers with `status`, to "slow" with 200 after `may_answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.posts.append((self.path, self.headers["Content-Type"], body))
            if len(server.posts) == 3:  # the slow one is answered after the others
                threading.Timer(0.3, server.may_answer.set).start()
            is_slow = body["text"] == "slow" and server.may_answer.wait(30)
            self.send_response(200 if is_slow else server.status)
            place = "/elsewhere" if server.status == 302 else "other://host/s3cret"
            self.send_header("Location", place)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # a client that does not trust it hangs up
    server.posts, server.status, server.may_answer = [], 200, threading.Event()
    server.url = f"https://localhost:{server.server_port}/hook/s3cret"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.may_answer.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def send(tmp_path):
    """`send(url, *texts)`: a process that sends alerts and ends; returns what it printed."""

    def run(url, *texts, trusted=True, end_s=5):
        own = {"LOWPREC_ALERT": url} | ({"SSL_CERT_FILE": str(CERTIFICATE)} if trusted else {})
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
        command = [sys.executable, "-W", "error", "-c", SCRIPT, str(end_s), *texts]
        with open(tmp_path / "printed", "w") as file:
            subprocess.run(command, env=kept | own, stdout=file, stderr=file, check=True)
        return (tmp_path / "printed").read_text()

    return run


def test_a_webhook_receives_every_text_once_as_slack_and_discord_expect(server, send):
    url = f" '{server.url.replace('https', 'HTTPS')}'"
    assert send(url, "a run: loss spike\né", "x" * 3000) == ""
    texts = ["a run: loss spike\né", "x" * 2000]
    expected = [("/hook/s3cret", "application/json", {"text": t, "content": t}) for t in texts]
    assert sorted(server.posts, key=str) == sorted(expected, key=str)


@pytest.mark.parametrize(
    ("status", "trusted", "reason"),
    [
        (500, True, "status 500"),
        (302, True, "status 302"),
        (303, True, "status 303"),
        (200, False, "SSLCertVerificationError"),
    ],
)
def test_a_failing_webhook_is_tried_once_per_alert_and_reported_once(
    server, send, status, trusted, reason
):
    server.status = status
    printed = send(server.url, "slow", "1", "2", trusted=trusted)
    assert printed.count("warning: the webhook of LOWPREC_ALERT failed: ") == 1
    assert reason in printed and "s3cret" not in printed and len(printed.splitlines()) == 1
    assert len(server.posts) == 3 * trusted


def test_a_webhook_that_never_answers_delays_the_end_of_a_process_by_a_bounded_time(server, send):
    began = time.monotonic()
    send(server.url, "slow", "slow", end_s=0.5)
    assert 0.5 < time.monotonic() - began < 3


def test_a_process_does_not_wait_for_a_command(send):
    began = time.monotonic()
    send("sleep 9", "1", end_s=20)
    assert time.monotonic() - began < 8


def test_a_command_that_has_ended_is_no_zombie_after_the_next_alert(monkeypatch):
    monkeypatch.setenv("LOWPREC_ALERT", "true")
    alert.alert("1")
    pid = alert._started[-1].pid
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    alert.alert("2")
    assert not Path(f"/proc/{pid}").exists()


def test_a_webhook_that_answers_byte_by_byte_is_given_up():
    with socket.create_server(("localhost", 0)) as server:
        url = f"http://localhost:{server.getsockname()[1]}"
        script = f"from lowprec import alert; alert.TIMEOUT_S = 1; alert._post('{url}', '')"
        with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.DEVNULL) as process:
            with server.accept()[0] as connection, contextlib.suppress(ConnectionError):
                for byte in b"HTTP/1.1 200 OK":
                    connection.send(bytes([byte]))
                    time.sleep(0.2)
                process.kill()
                pytest.fail("it still reads")


@pytest.mark.parametrize(
    "target", ["http://host/s3cret", "/no/s3cret", "https://host:s3cret/", "'s3cret"]
)
def test_an_alert_that_cannot_leave_prints_no_secret(send, target):
    printed = send(target, "1")
    assert "LOWPREC_ALERT" in printed and "s3cret" not in printed


def test_other_targets_are_refused_before_a_run_without_printing_them(make_config, monkeypatch):
    for target in ("/no/s3cret 1", "s3cret", "'s3cret"):
        monkeypatch.setenv("LOWPREC_ALERT", target)
        with pytest.raises(ConfigError, match="LOWPREC_ALERT: no such command") as error:
            preflight(make_config())
        assert "s3cret" not in str(error.value)
    for target in ("http://host/s3cret", " HTTP://host/s3cret", "'http://host/s3cret'"):
        monkeypatch.setenv("LOWPREC_ALERT", target)
        with pytest.raises(ConfigError, match="LOWPREC_ALERT=http://...: an https:// URL") as error:
            preflight(make_config())
        assert "s3cret" not in str(error.value)
    for target in ("https://host/s3cret", ' "HTTPS://host"', "echo a://b", ""):
        monkeypatch.setenv("LOWPREC_ALERT", target)
        preflight(make_config())

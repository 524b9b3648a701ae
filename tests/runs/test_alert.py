"""LOWPREC_ALERT: a command that a run neither waits for nor depends on."""

import subprocess
import sys
import time

import pytest

from lowprec.alert import alert
from lowprec.config.check import ConfigError
from lowprec.train.preflight import preflight

SCRIPT = '#!/bin/sh\nsleep 0.5\nprintf "%s|" "$@" >>{folder}/told\necho noise; echo noise >&2\n'


def test_a_command_gets_each_sentence_as_its_last_argument_in_the_background(
    tmp_path, monkeypatch, capfd
):
    script, told = tmp_path / "my notify", tmp_path / "told"
    script.write_text(SCRIPT.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setenv("LOWPREC_ALERT", f"'{script}' -to 'a b'")
    began = time.monotonic()
    alert("it's $HOME;\né")
    assert time.monotonic() - began < 0.5 and not told.exists()
    while not told.exists() or not told.read_text():
        time.sleep(0.02)
    assert told.read_text() == "-to|a b|it's $HOME;\né|"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("sleeps", "arrives"), [(0.3, True), (4, False)])
def test_the_end_of_a_process_waits_for_the_last_command_but_not_forever(
    tmp_path, monkeypatch, sleeps, arrives
):
    told = tmp_path / "told"
    monkeypatch.setenv("LOWPREC_ALERT", f"sh -c 'sleep {sleeps}; echo $0 >>{told}'")
    script = "import sys; from lowprec import alert; alert.END_S = 1; alert.alert('1'); sys.exit(3)"
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-Wd", "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert time.monotonic() - began < 4
    assert told.exists() == arrives


@pytest.mark.parametrize("target", ["/no/s3cret 1", "s3cret", "'s3cret", "https://host/s3cret"])
def test_another_target_is_refused_before_a_run_and_later_ignored_without_printing_it(
    target, make_config, monkeypatch, capfd
):
    monkeypatch.setenv("LOWPREC_ALERT", target)
    with pytest.raises(ConfigError, match="LOWPREC_ALERT: .*lowprec/train/README.md") as error:
        preflight(make_config())
    assert "s3cret" not in str(error.value)
    alert("1")
    assert capfd.readouterr() == ("", "")


def test_no_target_is_needed(make_config, monkeypatch):
    monkeypatch.delenv("LOWPREC_ALERT", raising=False)
    preflight(make_config())
    alert("1")

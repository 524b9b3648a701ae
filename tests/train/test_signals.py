"""A stopping signal asks; it does not interrupt."""

import os
import signal
import time

import pytest

from lowprec.train.signals import stop_request


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
def test_a_signal_sets_the_request_and_the_handler_is_put_back(number):
    before = signal.getsignal(number)
    with stop_request() as request:
        assert request.number is None
        os.kill(os.getpid(), number)
        assert request.number == number
    assert signal.getsignal(number) is before


def test_a_second_interrupt_interrupts():
    with stop_request(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_forked_child_still_dies_of_sigterm():
    ready, told = os.pipe()
    with stop_request():
        child = os.fork()
        if child == 0:
            os.write(told, b".")
            for _ in range(1000):  # a signal just before one long wait would be seen after it
                time.sleep(0.01)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
    assert os.WEXITSTATUS(status) == 128 + signal.SIGTERM

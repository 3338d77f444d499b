"""Ctrl-C and SIGTERM stop the block, also where Python drops exceptions."""

import os
import signal
import sys
import time
import weakref

import pytest

from kvconv.converter.signals import stoppable


class Thing:
    pass


def busy():
    """Run weak reference callbacks without end; half of all signals arrive in one."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        thing = Thing()
        keep = weakref.ref(thing, lambda _: time.sleep(0.003))
        del thing
        assert keep() is None
        time.sleep(0.003)
    pytest.fail("the signal was lost")


@pytest.mark.parametrize("delay", [0.1, 0.102, 0.104])
@pytest.mark.parametrize(
    ("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signal_in_a_callback_still_stops_the_block(number, raised, delay):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    hook = sys.unraisablehook
    child = os.fork()
    if child == 0:
        time.sleep(delay)
        os.kill(os.getppid(), number)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(raised) as caught, stoppable():
        busy()
    os.waitpid(child, 0)
    assert time.monotonic() - start < 5
    if raised is SystemExit:
        assert caught.value.code == 128 + number
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    assert sys.unraisablehook is hook

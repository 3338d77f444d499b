"""Makes Ctrl-C and SIGTERM stop an export, wherever they meet it."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_AGAIN_SECONDS = 0.002


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, and SIGTERM SystemExit, in the block.

    Python drops an exception that a signal raises inside a weak reference's callback, and tracing
    runs many of those; such a signal is sent again a moment later. Does nothing outside the main
    thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop: BaseException = KeyboardInterrupt()

    def leave(signal_number: int, _frame: FrameType | None) -> None:
        nonlocal stop
        if signal_number == signal.SIGINT:
            stop = KeyboardInterrupt()
        elif signal_number == signal.SIGTERM:
            stop = SystemExit(128 + signal_number)
        raise stop

    def dropped(unraisable: Any) -> None:
        if unraisable.exc_value is not stop:
            before_hook(unraisable)
        elif hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGALRM"):
        signals.append(signal.SIGALRM)
    # What the caller ignores (nohup) stays ignored.
    signals = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in signals}
    before_hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = before_hook
        for number, handler in before.items():
            signal.signal(number, handler)

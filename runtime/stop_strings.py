"""Stop strings: ending a streamed text before any of several strings.

Text that could be the beginning of a stop string is held back, so that no part of one is shown.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Released(NamedTuple):
    """What a filter lets through.

    Attributes:
        text: To show now.
        is_stopped: Whether a stop string was found; nothing follows.
    """

    text: str
    is_stopped: bool


class StopFilter:
    """Passes text on, up to the first stop string.

    Args:
        stop: Non-empty strings; none at all lets everything through at once.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> Released:
        """Take more text and release what can no longer be part of a stop string."""
        if not self._stop:
            return Released(text, False)
        text = self._held + text
        found = [start for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return Released(text[: min(found)], True)
        kept = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[kept:]
        return Released(text[:kept], False)

    def flush(self) -> str:
        """Return what was held back; the text ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of text that begins stop."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)

"""The stages of an export, on stderr as they run."""

import time
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvconv.cli.common import print_status


class StageLines:
    """One line per stage on stderr, with its seconds; a terminal sees them run."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._progress: Progress | None = None
        self._stage, self._start = "", 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(is_done=kind is None)

    def __call__(self, stage: str) -> None:
        """End the stage that runs, and show the one that begins."""
        self._end(is_done=True)
        self._stage, self._start = stage, time.perf_counter()
        if self._console.is_terminal:
            columns = (TextColumn("{task.description:<14}"), TimeElapsedColumn(), SpinnerColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(stage, total=None)
            self._progress.start()

    def _end(self, *, is_done: bool) -> None:
        """End the stage that runs, if one does; write its line if it came to its end."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._stage and is_done:
            seconds = time.perf_counter() - self._start
            print_status(f"{self._stage:<15}{seconds:7.1f} s")
            self._stage = ""

"""What a person or a program says in a chat: lines of standard input, continued ones joined."""

import codecs
import importlib
import sys
from typing import Any, Protocol

from kvconv.cli.common import print_status
from kvconv.cli.text_input import to_text
from kvconv.errors import PromptError

_CONTINUED = "\\"


class Lines(Protocol):
    """A source of what the user says."""

    is_interactive: bool
    """Whether a person types, who is prompted and can mend what is refused."""

    def read(self) -> str | None:
        """Return the next thing said, without its line end; None at the end."""


def open_lines() -> Lines:
    """Return a terminal with line editing, or whatever else standard input is.

    Raises:
        PromptError: There is no standard input.
    """
    if sys.stdin is None:
        raise PromptError("There is no standard input to read. Start the chat in a terminal.")
    return _Terminal() if sys.stdin.isatty() else _Pipe()


class _Terminal:
    """Lines that a person types; Ctrl-D or Ctrl-C twice at an empty line ends them."""

    is_interactive = True

    def __init__(self) -> None:
        try:  # importing it gives input() line editing and a history
            self._readline: Any = importlib.import_module("readline")
        except ImportError:  # some builds of Python have none
            self._readline = None
        self._has_warned = False

    def read(self) -> str | None:
        while True:
            try:
                text = _join(self._line)
            except KeyboardInterrupt:
                print_status("")
                if self._readline is not None and self._readline.get_line_buffer():
                    continue  # what was typed is dropped, as shells do it
                if self._has_warned:
                    return None
                print_status("Ctrl-C again or Ctrl-D leaves the chat; /help lists the commands.")
                self._has_warned = True
                continue
            if text is None:
                print_status("")
            self._has_warned = False
            return text

    def _line(self, is_first: bool) -> str | None:
        prompt = "> " if is_first else ". "
        try:
            if sys.stdout.isatty():
                return input(prompt)
            # The answers go elsewhere, and input() would write the prompt there too.
            sys.stderr.write(prompt)
            sys.stderr.flush()
            line = sys.stdin.readline()
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise PromptError(f"The line is not UTF-8 ({error}). Type it again.") from error
        return line.rstrip("\r\n") if line else None


class _Pipe:
    """Lines of a file or a program; blank ones say nothing."""

    is_interactive = False

    def __init__(self) -> None:
        self._number = 0

    def read(self) -> str | None:
        return _join(self._line)

    def _line(self, is_first: bool) -> str | None:
        line = sys.stdin.buffer.readline()
        self._number += 1
        if self._number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line:
            return None
        return to_text(f"Line {self._number} of standard input", line).rstrip("\r\n")


class _ReadLine(Protocol):
    def __call__(self, is_first: bool) -> str | None:
        """Return one line, or None at the end."""


def _join(read_line: _ReadLine) -> str | None:
    """Read lines up to the first that does not end in a backslash, and join them."""
    parts: list[str] = []
    while (line := read_line(not parts)) is not None:
        if not line.endswith(_CONTINUED):
            return "\n".join([*parts, line])
        parts.append(line.removesuffix(_CONTINUED))
    return "\n".join(parts) if parts else None

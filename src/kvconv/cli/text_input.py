"""Text that comes as bytes: standard input, and the lines of a file."""

import sys

from kvconv.errors import PromptError


def read_stdin() -> bytes:
    """Return all of standard input.

    Raises:
        PromptError: There is none.
    """
    if sys.stdin is None:
        raise PromptError("There is no standard input to read. Give the prompt as an argument.")
    return sys.stdin.buffer.read()


def to_text(where: str, raw: bytes) -> str:
    """Return UTF-8 bytes as text.

    Raises:
        PromptError: They are something else; says where.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} is not UTF-8 ({error}). Convert it to UTF-8 first.") from error

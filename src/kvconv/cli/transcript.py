"""A conversation as a file: a JSON list of messages, the form that chat programs exchange."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvconv.errors import OutputExistsError, PromptError


def save(messages: Sequence[dict[str, Any]], path: Path, *, overwrite: bool) -> None:
    """Write messages to a file, whole or not at all.

    Args:
        messages: Each has `role` and `content`.
        path: The file.
        overwrite: Replace a file that is there.

    Raises:
        OutputExistsError: The path exists, and is no regular file or may not be replaced.
        PromptError: A message is not valid UTF-8, or the path is no path.
        OSError: It cannot be written.
    """
    if path.is_dir():
        raise OutputExistsError(f"{path} is a folder. Give a file.", path=str(path))
    if os.path.lexists(path) and not overwrite:
        raise OutputExistsError(
            f"{path} exists. Give another name, or replace it with /save --force {path}.",
            path=str(path),
        )
    if path.exists() and not path.is_file():  # renaming would replace a device such as /dev/null
        raise OutputExistsError(f"{path} is no regular file. Give another name.", path=str(path))
    if "\0" in str(path):
        raise PromptError(f"{str(path)!r} cannot name a file. Give another name.")
    try:
        raw = (json.dumps(messages, ensure_ascii=False, indent=2) + "\n").encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"A message is not valid UTF-8 ({error}). Take it back or set another system message."
        ) from error
    partial = path.with_name(f".kvconv-{os.getpid()}.partial")
    try:
        partial.write_bytes(raw)
        partial.replace(path)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # a person named this one
        raise
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> list[dict[str, Any]]:
    """Read messages from a file.

    Raises:
        PromptError: It is not a list of messages.
        OSError: It cannot be read.
    """
    try:
        messages = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise PromptError(
            f"{path} is not JSON ({error}). Give a file that /save wrote, or a JSON list of "
            f"messages."
        ) from error
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise PromptError(
            f"{path} is JSON, but not a list of messages with a `role` and a `content` each. Give "
            f"a file that /save wrote."
        )
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value

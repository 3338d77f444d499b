"""Prompts of `kvconv run` that come from a file or from standard input.

A file whose first line that is not blank begins with `{` holds JSON lines: every line is an object.
Any other file holds plain text, one prompt a line. Blank lines are skipped. Everything wrong is
found before anything runs, and names the file and the line.
"""

import codecs
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

from kvconv.cli.text_input import read_stdin, to_text
from kvconv.errors import CacheFullError, PromptError
from kvconv.manifest import from_json

if TYPE_CHECKING:
    from kvconv.runtime import Generator, SamplingParams

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class FilePrompt:
    """One prompt of a file.

    Attributes:
        where: File and line, for errors.
        labels: What the result's JSON line says of the prompt: `index`, the line's `id` if it has
            one, and `prompt` or `messages`.
        params: The command line's, with what the line says otherwise.
    """

    where: str
    labels: Mapping[str, Any]
    params: "SamplingParams"

    def encode(self, generator: "Generator", *, chat_template: bool) -> list[int]:
        """Return the token ids, after checking that they fit.

        Args:
            generator: Of the model that will run it.
            chat_template: Wrap a plain prompt as one user turn; messages always take the template.

        Raises:
            PromptError: It cannot be encoded or does not fit; says where it stands.
        """
        try:
            if "messages" in self.labels:
                prompt_ids = generator.encode_chat(self.labels["messages"])
            else:
                prompt_ids = generator.encode(self.labels["prompt"], chat_template=chat_template)
            generator.check([prompt_ids], self.params)
        except (PromptError, CacheFullError) as error:
            raise PromptError(f"{self.where}: {error}") from error
        return prompt_ids


def read_prompts(path: str, params: "SamplingParams") -> list[FilePrompt]:
    """Read all prompts of a file.

    Args:
        path: The file; `-` is standard input.
        params: For what a line does not say. With a seed, prompt number i (from 0) gets seed + i
            unless its line has a seed of its own.

    Raises:
        PromptError: There is no prompt, or a line is not what it should be.
        OSError: The file cannot be read.
    """
    name = "Standard input" if path == "-" else path
    raw = read_stdin() if path == "-" else Path(path).read_bytes()
    lines = [
        (f"{name}, line {number}", line)
        for number, line in enumerate(raw.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise PromptError(f"{name} holds no prompt. Give one prompt a line.")
    is_json = lines[0][1].lstrip().startswith(b"{")
    return [
        _parse(where, to_text(where, line).removesuffix("\r"), index, params, is_json=is_json)
        for index, (where, line) in enumerate(lines)
    ]


def _parse(
    where: str, line: str, index: int, params: "SamplingParams", *, is_json: bool
) -> FilePrompt:
    if params.seed is not None:
        params = dataclasses.replace(params, seed=params.seed + index)
    if not is_json:
        return FilePrompt(where, {"index": index, "prompt": line}, params)
    document = _parse_json(where, line)
    known = {"id", "prompt", "messages", *(field.name for field in dataclasses.fields(params))}
    unknown = sorted(document.keys() - known)
    if unknown:
        raise PromptError(
            f"{where} has the unknown key {_short(unknown[0])}. Known are "
            f"{', '.join(sorted(known))}."
        )
    content: dict[str, Any] = {
        key: document.pop(key) for key in ("prompt", "messages") if key in document
    }
    if len(content) != 1:
        raise PromptError(f"{where} must have either a prompt or messages: {_short(line)}")
    _check_content(where, **content)
    labels: dict[str, Any] = {"index": index}
    if "id" in document:
        labels["id"] = document.pop("id")
    labels |= content
    return FilePrompt(where, labels, _override(where, params, document))


def _parse_json(where: str, line: str) -> dict[str, Any]:
    try:
        document = json.loads(line, parse_constant=_refuse_constant)
        json.dumps(document, ensure_ascii=False).encode()  # "\ud800" is JSON, but no character
    except (ValueError, RecursionError) as error:
        raise PromptError(
            f"{where} is not JSON ({error}): {_short(line)}. The file's first line begins with "
            f"'{{', so every line must be a JSON object such as "
            f'{{"prompt": "..."}}; quote plain prompts that way too.'
        ) from error
    if not isinstance(document, dict):
        raise PromptError(
            f"{where} is not a JSON object but {_short(line)}. Write it as "
            f'{{"prompt": "..."}} or {{"messages": [...]}}.'
        )
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_content(where: str, prompt: Any = "", messages: Any = None) -> None:
    if not isinstance(prompt, str):
        raise PromptError(f"{where}: prompt must be a string, found {_short(prompt)}.")
    if messages is None:
        return
    is_list = isinstance(messages, list) and len(messages) > 0
    if not is_list or not all(isinstance(item, dict) and "role" in item for item in messages):
        raise PromptError(
            f"{where}: messages must be a list of objects with a role and content, such as "
            f'[{{"role": "user", "content": "..."}}]; found {_short(messages)}.'
        )


def _override(
    where: str, params: "SamplingParams", document: Mapping[str, Any]
) -> "SamplingParams":
    """Return params with a line's values, each checked for its type and range."""
    hints = get_type_hints(type(params))
    try:
        values = {
            name: from_json(hints[name], _as_list(value) if name == "stop" else value, name)
            for name, value in document.items()
        }
        return dataclasses.replace(params, **values)
    except (TypeError, ValueError, OverflowError) as error:
        raise PromptError(f"{where}: {error}. Change the value, or leave it out.") from error


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."

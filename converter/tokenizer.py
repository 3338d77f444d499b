"""Writes a tokenizer as files that run without transformers, and proves that they agree with it.

A bundle's runtime encodes with the `tokenizers` package and `tokenizer.json` alone. Some of what
transformers adds around it (a BOS token, mostly) lives in Python, so both are compared on probe
texts before the bundle is finished.
"""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from kvconv.errors import ExportError
from kvconv.names import TOKENIZER_FILE

_PROBES = (
    "",
    "a",
    " Leading space, and two  inside",
    "What is the capital of France?",
    "def f(x):\n\treturn x ** 2  # 3.14159\n",
    "Ünïcödé, 漢字かな, العربية, हिन्दी, 👩‍🚀🏳️‍🌈",
    "e\u0301 and \u00e9, \u200bzero width, tab\tand\r\nline ends",
)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files; `tokenizer.json` encodes exactly as tokenizer(text) does.

    Raises:
        ExportError: The tokenizer exists only as Python code, or its file cannot be made to agree.
    """
    name = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise ExportError(
            f"The model's tokenizer {name} exists only as Python code, without a {TOKENIZER_FILE} "
            f"that runs elsewhere. Convert it to a fast tokenizer and save it with the model."
        )
    # Several templates would become a folder of files, and a bundle is flat.
    has_one_template = not isinstance(tokenizer.chat_template, dict)
    tokenizer.save_pretrained(folder, save_jinja_files=has_one_template)
    path = folder / TOKENIZER_FILE
    stored = Tokenizer.from_file(str(path))
    differing = _first_difference(tokenizer, stored)
    if differing is not None:
        _write_special_tokens(tokenizer, stored)
        stored.save(str(path))
        differing = _first_difference(tokenizer, Tokenizer.from_file(str(path)))
    if differing is not None:
        raise ExportError(
            f"The saved {TOKENIZER_FILE} of {name} encodes {differing!r} differently from "
            f"transformers, so a runtime would feed other tokens than the model was trained on. "
            f"Save the model with a fast tokenizer that needs no Python code around it."
        )


def _first_difference(tokenizer: PreTrainedTokenizerBase, stored: Tokenizer) -> str | None:
    """Return the first probe text on which the two disagree."""
    for text in _PROBES:
        if list(tokenizer(text)["input_ids"]) != stored.encode(text).ids:
            return text
    return None


def _write_special_tokens(tokenizer: PreTrainedTokenizerBase, stored: Tokenizer) -> None:
    """Give the stored tokenizer a post-processor that adds what transformers adds at the ends."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    outer = tokenizer("a")["input_ids"]
    start = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), len(outer))
    before, after = outer[:start], outer[start + len(inner) :]
    added = tokenizer.convert_ids_to_tokens([*before, *after])
    stored.post_processor = TemplateProcessing(
        single=[*added[: len(before)], "$A", *added[len(before) :]],
        special_tokens=list(zip(added, [*before, *after], strict=True)),
    )

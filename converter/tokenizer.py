"""Loads a tokenizer, writes it as files that run without transformers, proves that they agree.

A bundle's runtime encodes with the `tokenizers` package and `tokenizer.json` alone. Some of what
transformers adds around it (a BOS token, mostly) lives in Python, so both are compared on probe
texts before the bundle is finished.
"""

import importlib.util
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvconv.converter.damage import damaged_files
from kvconv.converter.quiet import quiet
from kvconv.errors import ExportError, MissingDependencyError
from kvconv.names import TOKENIZER_FILE

_SENTENCEPIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    *_SENTENCEPIECE_FILES,
    "vocab.json",
    "vocab.txt",
)
_PROBES = (
    "",
    "a",
    " Leading space, and two  inside",
    "What is the capital of France?",
    "def f(x):\n\treturn x ** 2  # 3.14159\n",
    "Ünïcödé, 漢字かな, العربية, हिन्दी, 👩‍🚀🏳️‍🌈",
    "e\u0301 and \u00e9, \u200bzero width, tab\tand\r\nline ends",
)


def load_tokenizer(
    model: str, folder: Path, *, gguf_file: str | None = None, **arguments: Any
) -> PreTrainedTokenizerBase | None:
    """Load a checkpoint's tokenizer; None if it has none.

    Args:
        model: What the user calls the model, for errors.
        folder: The checkpoint.
        gguf_file: The file in it that holds the tokenizer.
        arguments: What else `from_pretrained` needs.

    Raises:
        ModelNotFoundError: The files are damaged or incomplete.
        MissingDependencyError: They are of a kind that needs a package that is not installed.
    """
    files = [name for name in _FILES if (folder / name).is_file()]
    what = "files"
    if gguf_file is not None:
        arguments["gguf_file"] = gguf_file
    elif not files:
        return None
    else:
        what = f"tokenizer files ({', '.join(files)})"
        needs_conversion = TOKENIZER_FILE not in files and set(_SENTENCEPIECE_FILES) & {*files}
        if needs_conversion and importlib.util.find_spec("sentencepiece") is None:
            raise MissingDependencyError(package="sentencepiece", extra="export")
    with quiet(), damaged_files(model, what):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, **arguments)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, vocab_size: int) -> None:
    """Write the tokenizer's files; `tokenizer.json` encodes exactly as tokenizer(text) does.

    Args:
        tokenizer: The model's.
        folder: Where to write.
        vocab_size: Tokens that the model knows. The tokenizer may have more, as long as plain text
            does not need them: a token that was added and never trained is common.

    Raises:
        ExportError: The tokenizer exists only as Python code, its file cannot be made to agree, or
            it gives ids that the model does not know.
    """
    name = type(tokenizer).__name__
    if not tokenizer.is_fast:
        raise ExportError(
            f"The model's tokenizer {name} exists only as Python code, without a {TOKENIZER_FILE} "
            f"that runs elsewhere. Convert it to a fast tokenizer and save it with the model."
        )
    largest = max(max(tokenizer(text)["input_ids"], default=0) for text in _PROBES)
    if largest >= vocab_size:
        raise ExportError(
            f"The tokenizer {name} gives token id {largest} for plain text, but the model knows "
            f"only the {vocab_size} ids below {vocab_size}. Put the tokenizer that the model was "
            f"trained with into its folder."
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

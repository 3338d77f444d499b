"""The saved tokenizer, driven by the tokenizers package alone, encodes as transformers does."""

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvconv.converter.tokenizer import save_tokenizer
from kvconv.errors import ExportError
from tiny_bundle import VOCAB_SIZE
from tiny_decoders import tiny_tokenizer

TEXT = "Hé, 漢字!"


class AddsInPython:
    """A tokenizer that wraps what the fast one gives, outside of tokenizer.json."""

    is_fast = True

    def __init__(self, before=(), after=(), change=lambda ids: ids):
        self._fast = tiny_tokenizer()
        self._fast.backend_tokenizer.post_processor = None
        self._before, self._after, self._change = list(before), list(after), change

    def __call__(self, text, *, add_special_tokens=True):
        ids = self._change(self._fast(text, add_special_tokens=False)["input_ids"])
        return {"input_ids": [*self._before, *ids, *self._after] if add_special_tokens else ids}

    def save_pretrained(self, folder):
        self._fast.save_pretrained(folder)

    def convert_ids_to_tokens(self, ids):
        return self._fast.convert_ids_to_tokens(ids)


def stored_ids(folder, text):
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


def test_saved_tokenizer_agrees(tmp_path):
    tokenizer = tiny_tokenizer()
    save_tokenizer(tokenizer, tmp_path, VOCAB_SIZE)
    assert stored_ids(tmp_path, TEXT) == tokenizer(TEXT)["input_ids"]
    assert stored_ids(tmp_path, TEXT)[0] == 256


@pytest.mark.parametrize(
    ("before", "after"), [([256], []), ([], [257]), ([256, 258], [257])], ids=str
)
def test_special_tokens_added_in_python_go_into_the_file(tmp_path, before, after):
    tokenizer = AddsInPython(before, after)
    save_tokenizer(tokenizer, tmp_path, VOCAB_SIZE)
    assert stored_ids(tmp_path, TEXT) == tokenizer(TEXT)["input_ids"]


def test_tokens_in_the_file_that_transformers_does_not_add_go(tmp_path):
    tokenizer = AddsInPython()
    tokenizer._fast.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer._change = lambda ids: [token for token in ids if token != 256]
    save_tokenizer(tokenizer, tmp_path, VOCAB_SIZE)
    assert stored_ids(tmp_path, TEXT) == tokenizer(TEXT)["input_ids"]


def test_python_that_changes_the_text_is_refused(tmp_path):
    with pytest.raises(ExportError, match="encodes .* differently"):
        save_tokenizer(AddsInPython(change=lambda ids: ids[::-1]), tmp_path, VOCAB_SIZE)


def test_slow_tokenizer_is_refused(tmp_path):
    tokenizer = AddsInPython()
    tokenizer.is_fast = False
    with pytest.raises(ExportError, match="only as Python code"):
        save_tokenizer(tokenizer, tmp_path, VOCAB_SIZE)

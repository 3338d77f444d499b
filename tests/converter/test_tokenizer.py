"""The saved tokenizer, driven by the tokenizers package alone, encodes as transformers does."""

import importlib.util
import json

import pytest
import sentencepiece
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from kvconv.converter.tokenizer import load_tokenizer, save_tokenizer
from kvconv.errors import ExportError, MissingDependencyError, ModelNotFoundError
from tiny_bundle import VOCAB_SIZE
from tiny_decoders import tiny_tokenizer

TEXT = "Hé, 漢字!"


class AddsInPython:
    """A tokenizer that wraps what the fast one gives, outside of tokenizer.json."""

    is_fast = True
    chat_template = None

    def __init__(self, before=(), after=(), change=lambda ids: ids):
        self._fast = tiny_tokenizer()
        self._fast.backend_tokenizer.post_processor = None
        self._before, self._after, self._change = list(before), list(after), change

    def __call__(self, text, *, add_special_tokens=True):
        ids = self._change(self._fast(text, add_special_tokens=False)["input_ids"])
        return {"input_ids": [*self._before, *ids, *self._after] if add_special_tokens else ids}

    def save_pretrained(self, folder, **options):
        self._fast.save_pretrained(folder, **options)

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


def test_tokenizer_of_another_model_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(ExportError, match="gives token id 256 .* the 200 ids below 200"):
        save_tokenizer(tiny_tokenizer(), tmp_path, 200)


def test_added_token_that_the_model_does_not_know_is_no_reason_to_refuse(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<never trained>"])
    save_tokenizer(tokenizer, tmp_path, VOCAB_SIZE)
    assert stored_ids(tmp_path, "<never trained>")[-1] == VOCAB_SIZE


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    """A byte-fallback BPE model as Llama 2 has it."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "text").write_text("The quick brown fox jumps over the lazy dog.\n" * 9 + TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "tokenizer"), model_type="bpe",
        vocab_size=330, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return (folder / "tokenizer.model").read_bytes()


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("adds_eos", [True, False])
def test_sentencepiece_model_alone_becomes_a_tokenizer_file(
    tmp_path, sentencepiece_model, adds_bos, adds_eos
):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    config |= {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer("model", tmp_path)
    save_tokenizer(tokenizer, tmp_path, 330)
    original = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model)
    for text in (TEXT, "The lazy fox."):
        ids = [1] * adds_bos + original.encode(text) + [2] * adds_eos
        assert stored_ids(tmp_path, text) == ids == tokenizer(text)["input_ids"]


def test_sentencepiece_model_without_the_package_asks_for_it(
    tmp_path, sentencepiece_model, monkeypatch
):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"'sentencepiece' is not .* \"kvconv\[export\]\""
    ):
        load_tokenizer("model", tmp_path)


def test_no_tokenizer_files_are_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer("model", tmp_path) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tokenizer.json", r"tokenizer files \(tokenizer\.json\) of model are damaged"),
        ("tokenizer_config.json", "the vocabulary is missing"),
    ],
)
def test_unusable_tokenizer_is_refused_with_its_files(tmp_path, name, message):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=message):
        load_tokenizer("model", tmp_path)


def test_several_chat_templates_stay_in_a_flat_folder(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": "{{ eos_token }}", "tool_use": "tools"}
    save_tokenizer(tokenizer, tmp_path, VOCAB_SIZE)
    assert all(path.is_file() for path in tmp_path.iterdir())
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template

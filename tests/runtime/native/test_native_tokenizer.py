"""The native tokenizer (onnxruntime-extensions' library) against the Hugging Face one."""

import os
from pathlib import Path

import pytest

from kvconv.runtime import Bundle
from kvconv.runtime.chat_template import ChatTemplate
from kvconv.runtime.tokenizer import Tokenizer
from kvconv_c import NativeError
from kvconv_c import Tokenizer as NativeTokenizer
from tiny_bundle import BOS, EOS, VOCAB_SIZE, write_bundle

TEXTS = (
    "The capital of France is",
    "  two  spaces\n\n\ttab don't 12345",
    "Ünï çødé 你好 🙂🎉 é ½",
    "<s>special</s> inside",
    "",
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("tokenizer") / "bundle", attention="flash")


@pytest.fixture(scope="module")
def native(library, bundle) -> NativeTokenizer:
    return NativeTokenizer(library, bundle)


@pytest.fixture(scope="module")
def python(bundle) -> Tokenizer:
    return Tokenizer.open(Bundle.open(bundle))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_ids_and_text_equal_those_of_python(native, python, text, special):
    ids = python.encode(text, add_special_tokens=special)
    assert native.encode(text, add_special_tokens=special) == ids
    assert native.decode(ids) == python.detokenize(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(native, python, text):
    ids = python.encode(text)
    pieces = native.stream(ids)  # decoding each piece fails where it is half a character
    assert "".join(pieces) == python.detokenize(ids)


def test_half_a_character_at_the_end_is_shown_as_such(native, python):
    ids = [72, *"🙂".encode()[:2]]
    assert native.stream(ids)[:3] == ["H", "", ""]
    assert native.stream(ids)[3].startswith("\N{REPLACEMENT CHARACTER}")
    assert native.stream([BOS, 72, EOS]) == ["", "H", "", ""]


def test_chat_equals_that_of_python(native, bundle):
    messages = [("user", 'Say "hi" \\ \n🙂'), ("assistant", "hi"), ("user", "again")]
    rendered = ChatTemplate.open(Bundle.open(bundle)).render(
        [{"role": role, "content": content} for role, content in messages]
    )
    assert native.render_chat(messages) == rendered


def test_what_cannot_be_encoded_or_decoded_is_refused(native):
    for ids in ([-1], [VOCAB_SIZE], [5, 2**31 - 1]):
        with pytest.raises(NativeError, match=str(ids[-1])) as caught:
            native.decode(ids)
        assert caught.value.code == "INVALID_ARGUMENT"
    with pytest.raises(NativeError, match="UTF-8") as caught:
        native.encode(b"\xff\xfe")
    assert caught.value.code == "PROMPT_ERROR"
    assert native.decode([]) == native.decode([BOS, EOS]) == ""


def test_bundles_without_tokenizer_or_chat_template_are_refused(library, tmp_path):
    folder = write_bundle(tmp_path / "bundle", attention="flash", chat_template=None)
    with pytest.raises(NativeError, match="no chat template") as caught:
        NativeTokenizer(library, folder).render_chat([("user", "hi")])
    assert caught.value.code == "PROMPT_ERROR"
    with pytest.raises(NativeError) as caught:
        NativeTokenizer(library, tmp_path / "nowhere")
    assert caught.value.code == "BUNDLE_ERROR"


def test_missing_library_is_refused_with_where_it_was_sought(library, bundle, tmp_path):
    import subprocess
    import sys

    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r} + '/..')\n"
        "from pathlib import Path\n"
        "from kvconv_c import Library, NativeError, Tokenizer\n"
        "try:\n    Tokenizer(Library(Path(sys.argv[1])), Path(sys.argv[2]))\n"
        "except NativeError as error:\n    print(error.code, error)\n"
    )
    command = [sys.executable, "-c", code, library.c._name, str(bundle)]
    environment = {**os.environ, "KVCONV_TOKENIZER": str(tmp_path / "none.so")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("LIBRARY_ERROR"), result.stdout + result.stderr
    assert "KVCONV_TOKENIZER" in result.stdout

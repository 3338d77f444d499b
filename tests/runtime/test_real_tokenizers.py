"""The tokenizers of the demo models against transformers, over many scripts."""

import random
from pathlib import Path

import pytest
import tokenizers
import transformers

from kvconv.runtime.tokenizer import Detokenizer, Tokenizer

MODELS = Path(__file__).parents[2] / "models"
FILES = {
    "smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf",
    "gemma3": "gemma-3-270m-q4_k_m.gguf",
}
TEXTS = [
    "The capital of France is Paris.",
    "  two leading spaces,\ttab,\n\nempty line, trailing space ",
    "naïve café, e\u0301 combining, ﬁ ligature, \u00a0no-break",
    "今日は良い天気ですね。中文字符測試 안녕하세요 세계",
    "مرحبا بالعالم שלום עולם नमस्ते",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 𝕳𝖊𝖑𝖑𝖔 \U0001f9ff",
    "<|im_start|>user\nspecial<|im_end|> <bos><eos>",
    "def f(x):\n    return x ** 2  # code",
    "\ufffd \u200b \x00 \x7f",
    "",
]

pytestmark = pytest.mark.real


@pytest.fixture(scope="module", params=FILES)
def both(request, tmp_path_factory):
    """Return transformers' tokenizer and ours, which reads the file that the other wrote."""
    if not (MODELS / FILES[request.param]).is_file():
        pytest.skip(f"{FILES[request.param]} is not in models/; `make test-real` fetches it")
    theirs = transformers.AutoTokenizer.from_pretrained(MODELS, gguf_file=FILES[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(both, text):
    theirs, ours = both
    assert ours.encode(text) == theirs(text).input_ids
    plain = theirs(text, add_special_tokens=False).input_ids
    assert ours.encode(text, add_special_tokens=False) == plain
    expected = theirs.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.detokenize(plain) == expected


def test_streams_of_random_ids_join_to_their_text(both):
    theirs, ours = both
    generator = random.Random(0)
    byte_tokens = [i for i in range(300) if str(theirs.convert_ids_to_tokens(i)).startswith("<0x")]
    assert bool(byte_tokens) == ours._has_byte_tokens
    for round_index in range(60):
        pool = byte_tokens if byte_tokens and round_index % 3 == 0 else range(len(theirs))
        token_ids = [generator.choice(pool) for _ in range(30)]
        token_ids += theirs(generator.choice(TEXTS)).input_ids
        detokenizer = Detokenizer(ours)
        pieces = [*map(detokenizer.push, token_ids), detokenizer.flush()]
        expected = theirs.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert "".join(pieces) == expected


SCRIPTS = {
    "latin": (0x20, 0x250),
    "combining": (0x300, 0x370),
    "arabic": (0x620, 0x64B),
    "devanagari": (0x900, 0x97F),
    "hangul": (0xAC00, 0xD7A4),
    "cjk": (0x4E00, 0x9FFF),
    "rare cjk": (0x20000, 0x2A6DF),
    "emoji": (0x1F300, 0x1FAFF),
    "joiners": (0x200B, 0x200E),
    "variation selectors": (0xFE00, 0xFE10),
}


@pytest.mark.parametrize("script", [*SCRIPTS, "mixed"])
def test_streams_of_random_texts_show_whole_characters_only(both, script):
    """A replacement character in a piece would be one that a later token completes."""
    _, ours = both
    generator = random.Random(script)
    ranges = list(SCRIPTS.values()) if script == "mixed" else [SCRIPTS[script]]
    num_held_back = 0
    for _ in range(40):
        characters = (chr(generator.randrange(*generator.choice(ranges))) for _ in range(25))
        text = "".join(characters)
        detokenizer = Detokenizer(ours)
        shown = ""
        for token_id in ours.encode(text, add_special_tokens=False):
            piece = detokenizer.push(token_id)
            num_held_back += not piece
            assert "\ufffd" not in piece, text
            shown += piece
            assert text.startswith(shown), text
        assert shown + detokenizer.flush() == text
    if script in ("rare cjk", "emoji", "mixed"):
        assert num_held_back > 0, "these are spelled in bytes"


def test_stream_of_half_a_character_shows_it_only_at_the_end(both):
    _, ours = both
    ids = ours.encode("a\U0002a6d0", add_special_tokens=False)
    assert len(ids) > 2
    detokenizer = Detokenizer(ours)
    pieces = [detokenizer.push(token_id) for token_id in ids[:-1]]
    assert "".join(pieces) == "a"
    assert set(detokenizer.flush()) == {"\ufffd"}

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

"""Token ids and text against the backend, and the streaming detokenizer on random ids.

The property everywhere: pieces, joined, are the text of all ids at once, for any ids at all.
"""

import dataclasses
import json
import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from kvconv.errors import BundleError, PromptError
from kvconv.runtime.bundle import Bundle
from kvconv.runtime.tokenizer import Detokenizer, Tokenizer
from tiny_bundle import BOS, EOS, PAD, byte_tokenizer, write_bundle

TEXTS = [
    "The quick brown fox jumps over the lazy dog.  Two  spaces, a tab\tand\na line.",
    " leading space, trailing space ",
    "naïve café Ünïcödé e\u0301 a\u0308\u0323 (combining)",
    "今日は良い天気ですね。明日も晴れるといいな。中文字符測試",
    "안녕하세요 세계",
    "مرحبا بالعالم שלום עולם",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🤷🏼‍♀️ 𝕳𝖊𝖑𝖑𝖔",
    "a real replacement character: \ufffd, in the middle and at the end \ufffd",
    "def f(x):\n    return x ** 2  # code\n",
    "",
]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2 style: merges leave tokens that begin or end inside a character."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("two words", special=False)])
    return tokenizer


def sentencepiece(*, strips_leading_space: bool) -> tokenizers.Tokenizer:
    """Llama style (strips the space in front of a text) or Gemma style (does not)."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *_BYTES,
        "▁",
        "▁the",
        "the",
        "▁a",
        "a",
        "é",
        "今",
        "▁▁",
        "\n",
        "",
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    prepend = [normalizers.Prepend("▁")] if strips_leading_space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips_leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    return tokenizer


def trained(tokenizer: tokenizers.Tokenizer, trainer: object) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """BERT style: ## continues a word, and the decoder puts spaces between words."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    return trained(
        tokenizer,
        trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False),
    )


def unigram() -> tokenizers.Tokenizer:
    """T5 style: the likeliest pieces, with ▁ where a word begins."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    return trained(tokenizer, trainer)


def word_ends() -> tokenizers.Tokenizer:
    """OpenAI GPT style: </w> ends a word, and becomes a space unless it is the last."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False
    )
    return trained(tokenizer, trainer)


def metaspace(prepend_scheme: str) -> tokenizers.Tokenizer:
    """BPE over words that begin with ▁: before each part of a text, the first one, or none."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    special = ["<unk>", "<s>"]
    return trained(
        tokenizer,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False),
    )


BACKENDS = {
    "bytes": byte_tokenizer,
    "byte_level": byte_level,
    "llama": lambda: sentencepiece(strips_leading_space=True),
    "gemma": lambda: sentencepiece(strips_leading_space=False),
    "word_piece": word_piece,
    "unigram": unigram,
    "word_ends": word_ends,
    "metaspace": lambda: metaspace("always"),
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_never": lambda: metaspace("never"),
}


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request) -> Tokenizer:
    return Tokenizer(BACKENDS[request.param]())


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_of_a_text_joins_to_it_and_shows_only_whole_characters(tokenizer, text):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, token_ids)
    assert "".join(pieces) == tokenizer.detokenize(token_ids)
    if tokenizer.detokenize(token_ids) == text and "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(8))
def test_stream_of_random_ids_joins_to_their_text(tokenizer, seed):
    generator = random.Random(seed)
    # Models often have more ids than their tokenizer: those have no text.
    vocab_size = tokenizer._backend.get_vocab_size() + 5
    for _ in range(60):
        token_ids = [generator.randrange(vocab_size) for _ in range(generator.randrange(1, 40))]
        pieces = pieces_of(tokenizer, token_ids)
        assert "".join(pieces) == tokenizer.detokenize(token_ids), token_ids


@pytest.mark.parametrize("seed", range(4))
def test_stream_of_random_characters_joins_to_them(tokenizer, seed):
    generator = random.Random(seed)
    ranges = [(0x20, 0x7F), (0xA1, 0x250), (0x300, 0x370), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF)]
    for _ in range(40):
        text = "".join(chr(generator.randrange(*generator.choice(ranges))) for _ in range(25))
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert "".join(pieces_of(tokenizer, token_ids)) == tokenizer.detokenize(token_ids)


def test_stream_keeps_the_space_after_a_special_token():
    tokenizer = Tokenizer(BACKENDS["llama"]())
    vocab = tokenizer._backend.get_vocab()
    token_ids = [vocab["a"], vocab["</s>"], vocab["▁the"], vocab["▁"], vocab["▁a"]]
    assert pieces_of(tokenizer, token_ids) == ["a", "", " the", " ", " a", ""]


def test_stream_keeps_the_space_after_a_token_without_text():
    tokenizer = Tokenizer(BACKENDS["llama"]())
    vocab = tokenizer._backend.get_vocab()
    assert pieces_of(tokenizer, [vocab["a"], vocab[""], vocab["▁the"]]) == ["a", "", " the", ""]


def test_id_without_a_token_has_no_text_and_does_not_split_a_character():
    tokenizer = Tokenizer(BACKENDS["llama"]())
    vocab = tokenizer._backend.get_vocab()
    assert tokenizer.detokenize([len(vocab) + 3]) == ""
    token_ids = [vocab["a"], vocab["<0xC3>"], len(vocab) + 3, vocab["<0xA9>"], vocab["a"]]
    assert pieces_of(tokenizer, token_ids) == ["a", "", "", "", "éa", ""]


def test_stream_shows_text_as_soon_as_it_is_certain():
    tokenizer = Tokenizer(byte_tokenizer())
    token_ids = tokenizer.encode("aé", add_special_tokens=False)
    assert pieces_of(tokenizer, token_ids) == ["a", "", "é", ""]


def test_stream_flushes_half_a_character_as_the_whole_text_has_it():
    tokenizer = Tokenizer(byte_tokenizer())
    token_ids = tokenizer.encode("aé", add_special_tokens=False)[:-1]
    assert pieces_of(tokenizer, token_ids) == ["a", "", "\ufffd"]


def test_encode_adds_special_tokens_unless_told_not_to():
    tokenizer = Tokenizer(byte_tokenizer())
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [BOS, *plain]
    assert tokenizer.encode("hi</s>", add_special_tokens=False) == [*plain, EOS]
    assert tokenizer.detokenize([BOS, *plain, EOS]) == "hi"


def test_encode_ignores_padding_and_truncation_saved_in_the_file():
    backend = byte_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    assert len(Tokenizer(backend).encode("12345678")) == 9


def test_encode_refuses_text_that_is_not_unicode():
    with pytest.raises(PromptError, match="UTF-8"):
        Tokenizer(byte_tokenizer()).encode("\udcff")


def test_encode_refuses_a_token_that_the_model_does_not_know():
    tokenizer = Tokenizer(byte_tokenizer(), vocab_size=PAD)
    assert tokenizer.encode("hi</s>")[-1] == EOS
    with pytest.raises(PromptError, match=f"contains '<pad>', token {PAD} .* below {PAD}"):
        tokenizer.encode("hi<pad>")


def test_open_without_a_tokenizer_says_what_is_missing(tmp_path):
    bundle = Bundle.open(write_bundle(tmp_path / "bundle"))
    files = {name: entry for name, entry in bundle.manifest.files.items() if "tok" not in name}
    manifest = dataclasses.replace(bundle.manifest, files=files)
    with pytest.raises(BundleError, match="came without a tokenizer") as caught:
        Tokenizer.open(Bundle(bundle.path, manifest))
    assert caught.value.file == "tokenizer.json"


def test_open_names_the_damaged_file(tmp_path):
    folder = write_bundle(tmp_path / "bundle")
    bundle = Bundle.open(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"model": None}))
    with pytest.raises(BundleError) as caught:
        Tokenizer.open(bundle)
    assert caught.value.file == "tokenizer.json"

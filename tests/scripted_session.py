"""A session that computes the next token from the tokens it was fed, for tests of the generator.

`ScriptedSession` checks every run like the real one and remembers it; its next token is a function
of the row's unmasked tokens, so an answer can only be right if tokens, mask and padding are.
"""

from collections.abc import Callable

import numpy as np

from kvconv.manifest import CacheLayer, Manifest, Source
from kvconv.runtime import Generator
from kvconv.runtime.generator import GREEDY
from kvconv.runtime.kv_cache import KVCache
from kvconv.runtime.tokenizer import Tokenizer
from tiny_bundle import BOS, EOS, PAD, VOCAB_SIZE, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
MANIFEST = Manifest(
    source=Source("scripted", "folder"),
    architecture="Scripted",
    model_type="scripted",
    attention="flash",
    dtype="float32",
    weights_dtype="float32",
    opset=23,
    op_version=1,
    vocab_size=VOCAB_SIZE,
    max_sequence_length=2000,
    eos_token_ids=(EOS,),
    bos_token_id=BOS,
    pad_token_id=PAD,
    cache_layers=(CacheLayer(1, 1, 1, "float32"),),
    inputs=(),
    outputs=(),
    rewrites={},
    files={},
)


class TokenCache(KVCache):
    """Remembers the tokens themselves."""

    def __init__(self, batch_size: int, capacity: int) -> None:
        super().__init__((), batch_size, capacity, lambda: None)

    def _allocate(self):
        self.tokens = np.zeros((self.batch_size, 0), np.int64)

    nbytes = 0

    def prepare_run(self, sequence_length):
        raise NotImplementedError

    def commit_run(self, sequence_length):
        self._length += sequence_length

    def rewind(self, length):
        self.tokens, self._length = self.tokens[:, :length], length

    def fork(self):
        raise NotImplementedError


class ScriptedSession:
    """Gives the logits that make `script(tokens so far)` the most likely next token."""

    def __init__(self, script: Callable[[list[int]], int], manifest: Manifest = MANIFEST) -> None:
        self.script = script
        self.manifest = manifest
        self.run_lengths: list[int] = []

    def new_cache(self, batch_size, max_sequence_length, *, prefill_chunk=None):
        return TokenCache(batch_size, max_sequence_length)

    def check_cache(self, batch_size, max_sequence_length, *, prefill_chunk=None):
        pass

    def decode_step(self, cache, attention_mask, logits):
        class Step:
            @staticmethod
            def run(token_ids):
                mask = attention_mask[:, : cache.length + 1]
                ids = np.array(token_ids)[:, np.newaxis]
                self.run(cache, ids, attention_mask=mask, out=logits)

        return Step

    def run(self, cache, input_ids, *, attention_mask=None, out=None):
        cache.check_room(input_ids.shape[1])
        cache.tokens = np.concatenate([cache.tokens, input_ids], axis=1)
        cache.commit_run(input_ids.shape[1])
        if attention_mask is None:
            attention_mask = np.ones_like(cache.tokens)
        assert attention_mask.shape == cache.tokens.shape
        self.run_lengths.append(input_ids.shape[1])
        logits = np.zeros((cache.batch_size, 1, VOCAB_SIZE), np.float32) if out is None else out
        logits[...] = 0
        for row in range(cache.batch_size):
            seen = cache.tokens[row][attention_mask[row] == 1].tolist()
            logits[row, 0, self.script(seen)] = 10
        return logits


def hashed(seen: list[int]) -> int:
    """Script something that depends on every token and its place, with EOS now and then."""
    value = 17
    for token in seen:
        value = (value * 31 + token) % 1_000_003
    return EOS if value % 13 == 0 else value % 256


def collect(generator: Generator, prompts, params=GREEDY, **options):
    """Return per row: token ids, text, finish reason."""
    ids, texts, reasons = ([[] for _ in prompts] for _ in range(3))
    for event in generator.generate(prompts, params, **options):
        assert not reasons[event.row], "an event after the row's last one"
        ids[event.row].append(event.token_id)
        texts[event.row].append(event.text)
        if event.finish_reason:
            reasons[event.row].append(event.finish_reason)
    return ids, ["".join(t) for t in texts], [r[0] for r in reasons]

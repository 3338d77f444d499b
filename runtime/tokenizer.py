"""Text to token ids and back, from a bundle's tokenizer.json.

Ids and text equal those of the Hugging Face tokenizer that wrote the file. `Detokenizer` turns a
stream of ids into pieces of text which, joined, are exactly the text of all ids at once.
"""

import re
from collections.abc import Sequence

import tokenizers

from kvconv.errors import BundleError, PromptError
from kvconv.memory import release_memory
from kvconv.names import TOKENIZER_FILE
from kvconv.runtime.bundle import Bundle

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_SHOWN = 2
"""Ids that a `Detokenizer` keeps as a beginning: each is decoded again with every new one."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Encodes prompts and detokenizes ids.

    Args:
        backend: The parsed tokenizer.json; its padding and truncation are switched off, as
            transformers does for a single text.
        vocab_size: Tokens that the model knows; None for as many as the tokenizer has.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int | None = None) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._vocab_size = vocab_size
        special = backend.get_added_tokens_decoder().items()
        self._special_ids = frozenset(i for i, token in special if token.special)
        # The decoder decides on a whole run of byte tokens whether it is text.
        decoder = backend.decoder
        self._has_byte_tokens = decoder is not None and b"ByteFallback" in decoder.__getstate__()

    @classmethod
    def open(cls, bundle: Bundle) -> "Tokenizer":
        """Read tokenizer.json.

        Raises:
            BundleError: The bundle has none, or it cannot be parsed.
        """
        if TOKENIZER_FILE not in bundle:
            raise BundleError(
                f"The bundle {bundle.path} has no {TOKENIZER_FILE}: its model came without a "
                f"tokenizer. Put the tokenizer's files into the model's folder and export it "
                f"again; from Python, kvconv.runtime.Session takes token ids.",
                file=TOKENIZER_FILE,
            )
        path = bundle.file(TOKENIZER_FILE)
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except ValueError as error:
            raise BundleError(
                f"{TOKENIZER_FILE} in {bundle.path} cannot be read by tokenizers "
                f"{tokenizers.__version__}: {error}. Upgrade tokenizers, or export the model "
                f"again.",
                file=TOKENIZER_FILE,
            ) from error
        release_memory()  # parsing a large vocabulary took twice what is kept of it
        return cls(backend, bundle.manifest.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: Any text; special tokens spelled out in it become those tokens.
            add_special_tokens: Add what the model expects around a text, such as BOS. False for a
                rendered chat template, which has them already.

        Raises:
            PromptError: The text holds bytes that are not UTF-8, or a token that the model does
                not know.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                "The prompt is not valid UTF-8. Convert it to UTF-8 first."
            ) from error
        ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        largest = max(ids, default=0)
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise PromptError(
                f"The prompt contains {self._backend.id_to_token(largest)!r}, token {largest} of "
                f"the tokenizer, but the model knows only the {self._vocab_size} ids below "
                f"{self._vocab_size}. Leave it out of the prompt."
            )
        return ids

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def is_silent(self, token_id: int) -> bool:
        """Return whether an id has no text: a special token, or no token at all.

        Models often know more ids than their tokenizer, to round the vocabulary up.
        """
        return self.is_special(token_id) or self._backend.id_to_token(token_id) is None

    def is_special(self, token_id: int) -> bool:
        """Return whether an id is a special token; quicker than `is_silent`."""
        return token_id in self._special_ids

    def may_change(self, token_id: int, text: str) -> bool:
        """Return whether text that ends with this id may still change when more ids follow."""
        if text.endswith(_REPLACEMENT):
            return True
        if not self._has_byte_tokens:
            return False
        token = self._backend.id_to_token(token_id)
        # An id without a token does not end a run of bytes.
        return token is None or _BYTE_TOKEN.fullmatch(token) is not None


class Detokenizer:
    """Turns a stream of ids into text pieces, holding back what later ids may still change.

    A piece is the difference between two texts with the same beginning: detokenizing ids alone
    would lose the space that many decoders drop in front. `_ids[:_num_shown]` is that beginning;
    it is never empty once text was shown, and cut when it grows long.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._num_shown = 0
        self._shown_text = ""

    def push(self, token_id: int) -> str:
        """Take one more id and return the text that became certain, possibly empty."""
        # Ids without text are not kept: a beginning without text would lose the space. Whether an
        # id is one is asked late, because most have a text to show.
        if self._tokenizer.is_special(token_id):
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.detokenize(self._ids)
        piece = text[len(self._shown_text) :]
        if not piece or self._tokenizer.may_change(token_id, text):
            if self._tokenizer.is_silent(token_id):
                self._ids.pop()
            return ""
        if len(self._ids) > _MOST_SHOWN:
            del self._ids[: self._num_shown]
            text = self._tokenizer.detokenize(self._ids)
        self._num_shown = len(self._ids)
        self._shown_text = text
        return piece

    def flush(self) -> str:
        """Return the text still held back; no ids follow."""
        piece = self._tokenizer.detokenize(self._ids)[len(self._shown_text) :]
        self._ids, self._num_shown, self._shown_text = [], 0, ""
        return piece

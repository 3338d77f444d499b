"""The native runtime through ctypes: kvconv.h as thin Python, to compare with kvconv.runtime."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from kvconv.runtime import SamplingParams

CODES = (
    "OK INVALID_ARGUMENT INVALID_HANDLE ABI_MISMATCH BUNDLE_ERROR LIBRARY_ERROR CACHE_FULL "
    "NOT_ENOUGH_MEMORY REWIND_ERROR PROMPT_ERROR BUSY BUFFER_TOO_SMALL FAILED"
).split()
GREEDY = SamplingParams()
FINISH = (None, "eos", "length")


class NativeError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = CODES[code]


class ModelOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("abi_version", c_uint32),
        ("threads", c_int32),
        ("no_spin", c_int32),
        ("use_bundle_library", c_int32),
        ("reserved", c_int32),
        ("onnxruntime_library", c_char_p),
        ("op_library", c_char_p),
    ]


class ModelInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("vocab_size", c_int32),
        ("max_sequence_length", c_int32),
        ("num_layers", c_int32),
        ("bos_token_id", c_int32),
        ("num_eos_token_ids", c_int32),
        ("max_prefill_chunk", c_int32),
        ("threads", c_int32),
        ("weight_bytes", c_int64),
    ]


class Sampling(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("top_k", c_int32),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition_penalty", c_double),
    ]

    @classmethod
    def of(cls, params: SamplingParams) -> "Sampling":
        return cls(
            ctypes.sizeof(cls),
            params.top_k,
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
        )


class Stats(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("length", c_int32),
        ("cached", c_int32),
        ("capacity", c_int32),
        ("shortest_rewind", c_int32),
        ("reserved", c_int32),
        ("cache_bytes", c_int64),
        ("prefill_tokens", c_int64),
        ("decode_tokens", c_int64),
        ("prefill_ns", c_int64),
        ("decode_ns", c_int64),
        ("onnxruntime_ns", c_int64),
    ]


class Library:
    """libkvconv_runtime.so; every failure is a NativeError."""

    def __init__(self, path: Path) -> None:
        self.c: Any = ctypes.CDLL(str(path))
        self.c.kvconv_last_error.restype = c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.c, f"kvconv_{name}")(*arguments)
        if status:
            raise NativeError(status, self.c.kvconv_last_error().decode())

    def options(self, **fields: Any) -> ModelOptions:
        options = ModelOptions(struct_size=ctypes.sizeof(ModelOptions), abi_version=1)
        for name, value in fields.items():
            setattr(options, name, str(value).encode() if isinstance(value, Path) else value)
        return options

    def open(self, bundle: Path | bytes, **fields: Any) -> "Model":
        handle = c_void_p()
        path = bundle if isinstance(bundle, bytes) else str(bundle).encode()
        self.call("model_open", path, byref(self.options(**fields)), byref(handle))
        return Model(self, handle)


class Model:
    def __init__(self, library: Library, handle: c_void_p) -> None:
        self.library, self.handle = library, handle

    def __del__(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        self.library.c.kvconv_model_destroy(self.handle)

    @property
    def info(self) -> ModelInfo:
        info = ModelInfo(ctypes.sizeof(ModelInfo))
        self.library.call("model_get_info", self.handle, byref(info))
        return info

    def generator(self, capacity: int = 0, prefill_chunk: int = 0) -> "Generator":
        handle = c_void_p()
        self.library.call("generator_create", self.handle, capacity, prefill_chunk, byref(handle))
        return Generator(self.library, handle)


class Generator:
    def __init__(self, library: Library, handle: c_void_p) -> None:
        self.library, self.handle = library, handle

    def __del__(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        self.library.c.kvconv_generator_destroy(self.handle)

    def call(self, name: str, *arguments: Any) -> None:
        self.library.call(f"generator_{name}", self.handle, *arguments)

    def append(self, token_ids: Sequence[int]) -> None:
        self.call("append", (c_int32 * len(token_ids))(*token_ids), len(token_ids))

    def next(self, params: SamplingParams = GREEDY) -> tuple[int, str | None]:
        token, finish = c_int32(), c_int32()
        self.call("next", byref(Sampling.of(params)), byref(token), byref(finish))
        return token.value, FINISH[finish.value]

    def generate(self, count: int, params: SamplingParams = GREEDY) -> list[int]:
        """Return at most so many new tokens, the one that ends a text included."""
        if params.seed is not None:
            self.call("seed", ctypes.c_uint64(params.seed))
        ids: list[int] = []
        finish = None
        while len(ids) < count and finish is None:
            token, finish = self.next(params)
            ids.append(token)
        return ids

    def logits(self) -> np.ndarray:
        pointer, count = POINTER(c_float)(), c_int32()
        self.call("get_logits", byref(pointer), byref(count))
        return np.ctypeslib.as_array(pointer, (count.value,)).copy()

    @property
    def tokens(self) -> list[int]:
        needed = c_int32()
        ids = (c_int32 * self.stats.length)()
        self.call("get_tokens", ids, len(ids), byref(needed))
        return list(ids)

    @property
    def stats(self) -> Stats:
        stats = Stats(ctypes.sizeof(Stats))
        self.call("get_stats", byref(stats))
        return stats

    def rewind(self, length: int) -> None:
        self.call("rewind", length)

    def fork(self) -> "Generator":
        handle = c_void_p()
        self.call("fork", byref(handle))
        return Generator(self.library, handle)


class Tokenizer:
    def __init__(self, library: Library, bundle: Path, path: Path | None = None) -> None:
        self.library, self.handle = library, c_void_p()
        name = None if path is None else str(path).encode()
        library.call("tokenizer_open", str(bundle).encode(), name, byref(self.handle))

    def __del__(self) -> None:
        self.library.c.kvconv_tokenizer_destroy(self.handle)

    def encode(self, text: str | bytes, *, add_special_tokens: bool = True) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        needed = c_int32()
        arguments = (self.handle, raw, int(add_special_tokens))
        ids = (c_int32 * (len(raw) + 8))()
        self.library.call("tokenizer_encode", *arguments, ids, len(ids), byref(needed))
        return list(ids[: needed.value])

    def decode(self, ids: Sequence[int]) -> str:
        return self._text("tokenizer_decode", (c_int32 * len(ids))(*ids), len(ids))

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        columns = [
            (c_char_p * len(messages))(*(text.encode() for text in column))
            for column in zip(*messages, strict=True)
        ]
        return self._text("tokenizer_render_chat", *columns, len(messages))

    def stream(self, ids: Sequence[int]) -> list[str]:
        """Return the pieces of text that each id makes certain, and what is left at the end."""
        handle, text = c_void_p(), c_char_p()
        self.library.call("text_stream_create", self.handle, byref(handle))
        pieces = []
        for token_id in ids:
            self.library.call("text_stream_push", handle, token_id, byref(text))
            pieces.append((text.value or b"").decode())
        self.library.call("text_stream_flush", handle, byref(text))
        pieces.append((text.value or b"").decode())
        self.library.c.kvconv_text_stream_destroy(handle)
        return pieces

    def _text(self, name: str, *arguments: Any) -> str:
        needed = ctypes.c_size_t()
        buffer = ctypes.create_string_buffer(1 << 16)
        size = ctypes.c_size_t(len(buffer))
        self.library.call(name, self.handle, *arguments, buffer, size, byref(needed))
        assert needed.value == len(buffer.value) + 1
        return buffer.value.decode()

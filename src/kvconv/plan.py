"""What a decoder takes of memory, from its sizes alone and before anything is allocated.

`kvconv plan`, `inspect`, `run --stats` and the runtime ask the same functions. Keys, values and
scales are counted to the byte and logits too; the workspace of a run and what the program takes by
itself are estimates, made of what was measured on the CPU.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvconv.cache_layout import stored_tensors
from kvconv.errors import CacheFullError, NotEnoughMemoryError
from kvconv.flavour import FLAVOURS
from kvconv.manifest import AttentionFlavour, CacheLayer, Manifest, RunSizes
from kvconv.names import MODEL_FILE, WEIGHTS_FILE

PREFILL_CHUNK_TOKENS = 512
"""Tokens per row in one run of a prefill: bounds the activations, and lets Ctrl-C through."""

_WIDTHS_PER_TOKEN = 5
"""Numbers that a run holds per token, in parts of `RunSizes.activation_width`: 4.7 in SmolLM2 and
6.5 in Gemma 3 with int4 weights, 3.2 in SmolLM2 with float32 ones."""
_FLOAT32_BYTES = 4
SCORES_COPIES = 2
"""Score matrices that attention without tiles holds at once: the scores, and their softmax."""
_PROGRAM_BYTES = 75_000_000
"""Python, numpy, ONNX Runtime and the op library."""
_TOKENIZER_BYTES = 400
"""Of the tokenizer, per entry of the vocabulary: 270 and 370 (SmolLM2, Gemma 3), and some more
while it is read."""
_MOST = 2**40
DEFAULT_CONVERSATION_TOKENS = 8192
"""Capacity of a conversation's cache where nobody chose one and the model holds more."""


@dataclass(frozen=True, slots=True)
class CachePart:
    """The buffers of all layers of one kind.

    Attributes:
        num_layers: Layers of this kind.
        window_size: Tokens that they see; None for all.
        slots: Tokens per row that they hold: a ring its own capacity, others the context.
        data_bytes: Of keys and values.
        scale_bytes: Of their scales.
    """

    num_layers: int
    window_size: int | None
    slots: int
    data_bytes: int
    scale_bytes: int


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What decides how much memory a decoder takes.

    Attributes:
        cache_layers: One entry per layer.
        attention: Flavour of the attention nodes.
        weight_bytes: Of the weights, each stored once.
        vocab_size: Width of the logits.
        run: What a run takes by itself; None where nobody knows (older bundles).
    """

    cache_layers: tuple[CacheLayer, ...]
    attention: AttentionFlavour
    weight_bytes: int
    vocab_size: int
    run: RunSizes | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The memory of a decoder at one batch size and context, in bytes.

    Attributes:
        batch_size: Rows.
        context: Tokens per row, prompt and new.
        run_tokens: Of the largest run, all rows together.
        weights: The weights, each stored once.
        packed: What ONNX Runtime keeps beside them once they are loaded; see `RunSizes`.
        cache: Keys and values, by kind of layer.
        growth: The longer presents that a cache which grows needs beside its pasts.
        logits: Float32 logits of one token per row.
        workspace: Activations of a run, and scores where attention writes them.
        program: Python, ONNX Runtime, the tokenizer.
    """

    batch_size: int
    context: int
    run_tokens: int
    weights: int
    packed: int
    cache: tuple[CachePart, ...]
    growth: int
    logits: int
    workspace: int
    program: int

    @property
    def cache_bytes(self) -> int:
        """Keys and values with their scales: all buffers of the cache."""
        return sum(part.data_bytes + part.scale_bytes for part in self.cache)

    @property
    def run_bytes(self) -> int:
        """What comes on top of a loaded model."""
        return self.cache_bytes + self.growth + self.logits + self.workspace

    @property
    def total(self) -> int:
        """Everything."""
        return self.weights + self.packed + self.program + self.run_bytes


def bundle_sizes(manifest: Manifest) -> DecoderSizes:
    """Return the sizes of a bundle."""
    weights = (
        manifest.files[name].size for name in (MODEL_FILE, WEIGHTS_FILE) if name in manifest.files
    )
    return DecoderSizes(
        cache_layers=manifest.cache_layers,
        attention=manifest.attention,
        weight_bytes=sum(weights),
        vocab_size=manifest.vocab_size,
        run=manifest.run_sizes,
    )


def plan(
    sizes: DecoderSizes, *, batch_size: int, context: int, prefill_chunk: int | None = None
) -> Plan:
    """Count what a decoder takes.

    Args:
        sizes: The decoder.
        batch_size: Rows, >= 1.
        context: Tokens per row, prompt and new, >= 1.
        prefill_chunk: Tokens of a prompt that run at once; None for what the runtime does.
    """
    cache = cache_parts(sizes.cache_layers, batch_size=batch_size, max_sequence_length=context)
    chunk = prefill_chunk or default_chunk(
        sizes.attention, batch_size, context, cache_layers=sizes.cache_layers
    )
    chunk = min(chunk, context)
    run = sizes.run
    grows = not FLAVOURS[sizes.attention].shared_buffer
    return Plan(
        batch_size=batch_size,
        context=context,
        run_tokens=batch_size * chunk,
        weights=sizes.weight_bytes,
        packed=run.packed_bytes if run else 0,
        cache=cache,
        growth=sum(part.data_bytes for part in cache) if grows else 0,
        logits=batch_size * sizes.vocab_size * _FLOAT32_BYTES,
        workspace=_workspace_bytes(sizes, batch_size * chunk, context),
        program=_PROGRAM_BYTES + _TOKENIZER_BYTES * sizes.vocab_size,
    )


def default_chunk(
    attention: AttentionFlavour,
    batch_size: int,
    new_tokens: int,
    *,
    cache_layers: Sequence[CacheLayer],
) -> int:
    """Return how many tokens per row of a prompt run at once where nobody chose.

    Args:
        attention: Flavour of the attention nodes.
        batch_size: Rows that run together.
        new_tokens: Tokens per row.
        cache_layers: One entry per layer.
    """
    if not FLAVOURS[attention].takes_chunks(batch_size):
        return new_tokens
    return min(PREFILL_CHUNK_TOKENS, largest_chunk(cache_layers) or PREFILL_CHUNK_TOKENS)


def largest_chunk(cache_layers: Sequence[CacheLayer]) -> int | None:
    """Return the most tokens of a prompt that rings take at once; None without rings."""
    slacks = (layer.slack for layer in cache_layers if layer.slack is not None)
    return min((max(slack, 1) for slack in slacks), default=None)


def check_chunk(cache_layers: Sequence[CacheLayer], prefill_chunk: int | None) -> None:
    """Refuse chunks of a prompt that are more than rings take at once.

    Args:
        cache_layers: One entry per layer.
        prefill_chunk: Tokens per row of a chunk, as the caller wants it; None for the default.

    Raises:
        CacheFullError: A chunk would overwrite keys that its first token sees.
    """
    most = largest_chunk(cache_layers)
    if prefill_chunk is not None and most is not None and prefill_chunk > most:
        raise CacheFullError(
            f"--prefill-chunk is {prefill_chunk}, and the ring caches of this bundle take at most "
            f"{most} tokens of a prompt at once. Choose {most} or less, or export the model "
            f"with --no-ring.",
            needed=prefill_chunk,
            capacity=most,
        )


def _workspace_bytes(sizes: DecoderSizes, tokens: int, context: int) -> int:
    if sizes.run is None:
        return 0
    # float16 activations too: the CPU multiplies in float32.
    activations = tokens * sizes.run.activation_width * _WIDTHS_PER_TOKEN * _FLOAT32_BYTES
    if sizes.attention == "flash":
        return activations
    return activations + SCORES_COPIES * score_bytes(sizes.run, tokens, context)


def score_bytes(run: RunSizes, tokens: int, context: int) -> int:
    """Return the bytes of the float32 scores of one layer, which Flash Attention never writes.

    Args:
        run: Of the decoder.
        tokens: Of one run, all rows together.
        context: Tokens that each of them sees.
    """
    return run.num_attention_heads * tokens * context * _FLOAT32_BYTES


def cache_parts(
    cache_layers: Sequence[CacheLayer], *, batch_size: int, max_sequence_length: int
) -> tuple[CachePart, ...]:
    """Return the buffers of a cache by kind of layer: those that see all tokens, and by window.

    Args:
        cache_layers: One entry per layer.
        batch_size: Sequences held at once.
        max_sequence_length: Capacity in tokens; a ring holds no more than its own.
    """
    parts: dict[tuple[int | None, int], CachePart] = {}
    for layer in cache_layers:
        slots = layer.slots(max_sequence_length)
        kind = (layer.window_size, slots)
        found = parts.get(kind, CachePart(0, *kind, data_bytes=0, scale_bytes=0))
        sizes = [(t.is_scale, batch_size * slots * t.slot_bytes) for t in stored_tensors(layer)]
        parts[kind] = dataclasses.replace(
            found,
            num_layers=found.num_layers + 1,
            data_bytes=found.data_bytes + sum(size for is_scale, size in sizes if not is_scale),
            scale_bytes=found.scale_bytes + sum(size for is_scale, size in sizes if is_scale),
        )
    return tuple(parts.values())


def kv_cache_bytes(
    cache_layers: Sequence[CacheLayer], *, batch_size: int, max_sequence_length: int
) -> int:
    """Return the bytes of all buffers of a cache, scales included; arguments as `cache_parts`."""
    parts = cache_parts(
        cache_layers, batch_size=batch_size, max_sequence_length=max_sequence_length
    )
    return sum(part.data_bytes + part.scale_bytes for part in parts)


def largest(fits: Callable[[int], bool], limit: int | None = None) -> int:
    """Return the largest number from 1 on that fits; 0 if 1 does not.

    Args:
        fits: True up to some number and False beyond.
        limit: Look no further.
    """
    limit = _MOST if limit is None else limit
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_run_fits(planned: Plan, free_bytes: int | None) -> None:
    """Refuse a run that would not fit beside the loaded model.

    Args:
        planned: The run.
        free_bytes: What the machine has; None where it does not tell, and nothing is refused.

    Raises:
        NotEnoughMemoryError: The cache and what a run takes are more than is free.
    """
    if free_bytes is None or planned.run_bytes <= free_bytes:
        return
    raise NotEnoughMemoryError(
        f"A KV cache of {planned.batch_size} x {planned.context} tokens takes "
        f"{planned.cache_bytes:,} bytes, and a run {planned.run_bytes - planned.cache_bytes:,} "
        f"more; "
        f"{free_bytes:,} are free. A smaller batch or fewer tokens take less (--batch-size and "
        f"--max-sequence-length; of bench --batch and --depths); `kvconv plan` says what fits.",
        needed_bytes=planned.run_bytes,
        free_bytes=free_bytes,
    )


def check_weights_fit(sizes: DecoderSizes, free_bytes: int | None) -> None:
    """Refuse to load weights that memory cannot hold.

    Args:
        sizes: The decoder.
        free_bytes: What the machine has; None where it does not tell, and nothing is refused.

    Raises:
        NotEnoughMemoryError: The weights are more than is free.
    """
    needed = sizes.weight_bytes + (sizes.run.packed_bytes if sizes.run else 0)
    if free_bytes is None or needed <= free_bytes:
        return
    raise NotEnoughMemoryError(
        f"The weights take {needed:,} bytes and {free_bytes:,} are free. Close other programs, "
        f"export with --weights int4, or choose a smaller model.",
        needed_bytes=needed,
        free_bytes=free_bytes,
    )

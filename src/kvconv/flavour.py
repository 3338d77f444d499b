"""What runs each attention flavour takes: one table for converter, runtime and verification."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvconv.manifest import AccuracyLevel, AttentionFlavour


@dataclass(frozen=True, slots=True)
class Flavour:
    """What the attention nodes of a flavour take.

    Attributes:
        shared_buffer: Whether past and present may be one memory of full capacity.
        padding: Whether attention_mask may hold zeros: left and right padding, holes.
        own_cache_dtype: Whether keys and values may be stored as something else than the
            activations are. ONNX's operators take one type for both; those of ONNX Runtime have
            quantised caches with scales fixed at export only, which kvconv does not make.
        batched_chunks: Whether several new tokens may follow a past at a batch size above 1.
        accuracy_levels: Those that its products with quantised weights take, the default first.
            ONNX Runtime's operator computes level 2 (float16, says its contract) as level 1.
    """

    shared_buffer: bool
    padding: bool
    own_cache_dtype: bool
    batched_chunks: bool
    accuracy_levels: tuple[AccuracyLevel, ...]

    def takes_chunks(self, batch_size: int) -> bool:
        """Tell whether several new tokens may follow a past."""
        return batch_size == 1 or self.batched_chunks


FLAVOURS: Mapping[AttentionFlavour, Flavour] = {
    "flash": Flavour(
        shared_buffer=True,
        padding=True,
        own_cache_dtype=True,
        batched_chunks=True,
        accuracy_levels=(2, 1, 4),
    ),
    "standard": Flavour(
        shared_buffer=False,
        padding=True,
        own_cache_dtype=False,
        batched_chunks=True,
        accuracy_levels=(4, 1),
    ),
    "gqa": Flavour(
        shared_buffer=True,
        padding=False,
        own_cache_dtype=False,
        batched_chunks=False,
        accuracy_levels=(4, 1),
    ),
}

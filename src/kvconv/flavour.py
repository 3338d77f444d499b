"""What runs each attention flavour takes: one table for converter, runtime and verification."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvconv.manifest import AttentionFlavour


@dataclass(frozen=True, slots=True)
class Flavour:
    """What the attention nodes of a flavour take.

    Attributes:
        shared_buffer: Whether past and present may be one memory of full capacity.
        padding: Whether attention_mask may hold zeros: left and right padding, holes.
        batched_chunks: Whether several new tokens may follow a past at a batch size above 1.
    """

    shared_buffer: bool
    padding: bool
    batched_chunks: bool


FLAVOURS: Mapping[AttentionFlavour, Flavour] = {
    "flash": Flavour(shared_buffer=True, padding=True, batched_chunks=True),
    "standard": Flavour(shared_buffer=False, padding=True, batched_chunks=True),
    "gqa": Flavour(shared_buffer=True, padding=False, batched_chunks=False),
}

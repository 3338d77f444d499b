"""Which kernels an attention needs, and how each is compiled for each GPU."""

from collections.abc import Iterable, Mapping
from enum import IntEnum, IntFlag
from typing import NamedTuple

from kvconv.custom_ops.triton import arguments
from kvconv.errors import ExportError


class Kind(IntEnum):
    """What a kernel does; a run appends, then prefills, or decodes and combines."""

    APPEND = 1
    PREFILL = 2
    DECODE = 3
    COMBINE = 4


class Feature(IntFlag):
    """What a node has beside queries, keys and values; kernels are compiled for exactly that."""

    ROTARY = 1
    ROTARY_INTERLEAVED = 2
    MASK = 4
    BIAS = 8
    ALIBI = 16
    SINK = 32
    SOFTCAP = 64
    WINDOW = 128
    RING = 256
    CAUSAL = 512


ELEMENTS = {1: "fp32", 2: "u8", 3: "i8", 10: "fp16", 16: "bf16"}
"""ONNX's element types as Triton spells them; uint8 is an int4 cache."""
CACHE_BITS = {2: 4, 3: 8}
"""Bits of a cached number of quantised caches; others are float."""
DTYPE_NAMES = {1: "float32", 2: "int4", 3: "int8", 10: "float16", 16: "bfloat16"}

HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
"""Widths of a head that there are tiles for, and those of values."""
MAX_GROUP = 64


class Attention(NamedTuple):
    """What tells FlashAttention nodes apart where kernels are concerned.

    Attributes:
        activation_type: ONNX element type of queries and outputs.
        cache_type: Of the cache.
        head_dim: Numbers of a query or key head.
        value_head_dim: Numbers of a value head.
        group: Query heads of a key/value head.
        rotary_dim: Numbers of a head that are rotated; 0 without rotary.
        features: Bits of `Feature`.
    """

    activation_type: int
    cache_type: int
    head_dim: int
    value_head_dim: int
    group: int
    rotary_dim: int
    features: Feature

    def check(self, node: str) -> None:
        """Refuse what there are no kernels for.

        Raises:
            ExportError: Names the node, the value, and the values there are.
        """
        for what, width in (("head_dim", self.head_dim), ("value_head_dim", self.value_head_dim)):
            if width not in HEAD_DIMS:
                raise ExportError(
                    f"{node} has {what} {width}; kvconv's CUDA kernels take "
                    f"{', '.join(map(str, HEAD_DIMS))}. Export for the CPU, without "
                    f"--provider cuda."
                )
        if self.group > MAX_GROUP:
            raise ExportError(
                f"{node} has {self.group} query heads for each key/value head; kvconv's CUDA "
                f"kernels take at most {MAX_GROUP}. Export for the CPU, without --provider cuda."
            )


class Gpu(NamedTuple):
    """A GPU to compile for.

    Attributes:
        compute_capability: 86 is 8.6.
        max_shared_bytes: What a block may have of shared memory.
    """

    compute_capability: int
    max_shared_bytes: int


_KIB = 1024
GPUS = {
    "sm_80": Gpu(80, 163 * _KIB),
    "sm_86": Gpu(86, 99 * _KIB),
    "sm_89": Gpu(89, 99 * _KIB),
    "sm_90": Gpu(90, 227 * _KIB),
    "sm_100": Gpu(100, 227 * _KIB),
    "sm_120": Gpu(120, 99 * _KIB),
}
"""By the names of `kvconv build --gpu`."""
DEFAULT_GPUS = tuple(GPUS)
PTX_GPU = Gpu(80, 99 * _KIB)
"""Every GPU from 8.0 on must run PTX, so it has the shared memory of the smallest of them."""


def parse_gpus(gpus: Iterable[str]) -> tuple[str, ...]:
    """Return the GPUs to compile for, in order and once each; all that there are for none.

    Raises:
        ExportError: One is not known; says which are.
    """
    wanted = {gpu.strip() for gpu in gpus}
    for gpu in sorted(wanted):
        if gpu not in GPUS:
            raise ExportError(
                f"{gpu!r} is no GPU that kvconv compiles for. Choose of {','.join(GPUS)}; newer "
                f"ones of the same generation run these, and all others from 8.0 on run PTX."
            )
    return tuple(gpu for gpu in GPUS if gpu in wanted) or DEFAULT_GPUS


class Tile(NamedTuple):
    """How much a program does at once, and with how many threads.

    Attributes:
        m: New tokens of a program.
        n: Slots of a step.
        warps: Warps of a block.
        stages: Loads in flight.
    """

    m: int
    n: int
    warps: int
    stages: int


def choose_tile(kind: Kind, attention: Attention, gpu: Gpu) -> Tile:
    """Return the tile that a kernel is compiled with."""
    width = max(attention.head_dim, attention.value_head_dim)
    if kind is Kind.APPEND:
        return Tile(16, 16, 4, 1)
    if kind is Kind.COMBINE:
        return Tile(1, 16, 4, 1)
    wide_elements = attention.activation_type == 1 or attention.cache_type == 1
    if kind is Kind.DECODE:
        slots = 128 if width <= 64 else 64 if width <= 128 else 32
        if wide_elements:
            slots //= 2
        group = max(16, 1 << (attention.group - 1).bit_length())
        return Tile(group, slots, 4, 2 if attention.cache_type in CACHE_BITS else 3)
    if width > 128 and attention.cache_type in CACHE_BITS:
        # Unpacking codes takes registers that wider tiles would spill.
        tile = Tile(64 if _is_hopper(gpu) else 32, 32, 8, 2)
    else:
        tile = _prefill_tile(width, gpu, wide_elements=wide_elements)
    if attention.features & Feature.BIAS:
        # The addresses of a tile of the bias take registers that larger tiles do not have.
        tile = tile._replace(n=min(tile.n, 64 if width <= 64 else 32))
    return tile


def _is_hopper(gpu: Gpu) -> bool:
    """Return whether products of whole warp groups, and much shared memory, are to be had."""
    return gpu.compute_capability in (90, 100)


def _prefill_tile(width: int, gpu: Gpu, *, wide_elements: bool) -> Tile:
    large = gpu.max_shared_bytes >= 163 * _KIB
    hopper = _is_hopper(gpu)
    if wide_elements:
        if width > 128:
            return Tile(32, 16, 4, 1)
        return Tile(64 if large or width <= 64 else 32, 32, 4, 2)
    if width <= 64:
        return Tile(128, 128 if hopper else 64, 8, 3 if large and not hopper else 2)
    if width <= 128:
        if hopper:
            return Tile(128, 128, 8, 2)
        return Tile(128, 32 if gpu.compute_capability == 86 else 64, 8, 3 if large else 2)
    return Tile(64, 64 if hopper else 32, 8, 2)


class Variant(NamedTuple):
    """One kernel to compile: an entry of the pack.

    Attributes:
        kind: What it does.
        attention: For which nodes.
        gpu: For which GPU.
        is_ptx: Whether it is text for the driver to compile, rather than machine code.
    """

    kind: Kind
    attention: Attention
    gpu: Gpu
    is_ptx: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments that it takes, in order."""
        kind = self.kind.name.lower()
        taken = set(arguments.ALWAYS[kind])
        if self.attention.cache_type in CACHE_BITS:
            taken |= arguments.OF_CACHE.get(kind, frozenset())
        for feature, needed in arguments.OF_FEATURE[kind].items():
            if self.attention.features & Feature[feature.upper()]:
                taken |= needed
        return tuple(name for name in arguments.ARGUMENTS if name in taken)

    @property
    def signature(self) -> dict[str, str]:
        """Triton's types of the arguments, by name."""
        own = {
            arguments.ACTIVATION: f"*{ELEMENTS[self.attention.activation_type]}",
            arguments.CACHE: f"*{ELEMENTS[self.attention.cache_type]}",
        }
        types = {name: arguments.ARGUMENTS[name].type for name in self.arguments}
        return {name: own.get(kind, kind) for name, kind in types.items()}

    @property
    def constants(self) -> Mapping[str, int]:
        """The kernel's constexpr parameters."""
        tile = self.tile
        return {
            "HEAD_DIM": self.attention.head_dim,
            "VALUE_HEAD_DIM": self.attention.value_head_dim,
            "GROUP": self.attention.group,
            "ROTARY_DIM": self.attention.rotary_dim,
            "FEATURES": int(self.attention.features),
            "CACHE_BITS": CACHE_BITS.get(self.attention.cache_type, 0),
            "TILE_M": tile.m,
            "TILE_N": tile.n,
        }

    @property
    def tile(self) -> Tile:
        """How it is tiled."""
        return choose_tile(self.kind, self.attention, self.gpu)

    def __str__(self) -> str:
        a = self.attention
        features = "+".join(
            str(feature.name).lower() for feature in Feature if feature & a.features
        )
        gpu = (
            f"PTX {self.gpu.compute_capability}"
            if self.is_ptx
            else (f"sm_{self.gpu.compute_capability}")
        )
        return (
            f"{self.kind.name.lower()} {gpu} {DTYPE_NAMES[a.activation_type]}, "
            f"{DTYPE_NAMES[a.cache_type]} cache, head_dim {a.head_dim}/{a.value_head_dim}, group "
            f"{a.group}, rotary_dim {a.rotary_dim}, {features or 'no features'}"
        )


def list_variants(attentions: Iterable[Attention], gpus: Iterable[str]) -> list[Variant]:
    """Return all kernels for these nodes, in the order of the pack.

    Args:
        attentions: Of the nodes; equal ones share kernels.
        gpus: Names of `GPUS`; PTX comes with any.
    """
    targets = [(GPUS[gpu], False) for gpu in gpus] + [(PTX_GPU, True)]
    variants = [
        Variant(kind, attention, gpu, is_ptx)
        for kind in Kind
        for attention in set(attentions)
        for gpu, is_ptx in targets
    ]
    return sorted(variants, key=sort_key)


def sort_key(variant: Variant) -> tuple[int, ...]:
    """Return what packs are ordered by: kind, types, sizes, features, format, capability."""
    return (
        variant.kind,
        *map(int, variant.attention),
        2 if variant.is_ptx else 1,
        variant.gpu.compute_capability,
    )

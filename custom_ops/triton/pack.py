"""The file of kernels, kvconv_kernels.bin: written and read.

All numbers are little endian. A header of 64 bytes (magic, version, number of kernels, size of the
file, sha256 of what follows), a table with 320 bytes for each kernel, and the images, each at a
multiple of 64. custom_ops/src/cuda/kernel_pack.h reads the same.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import NamedTuple

from kvconv import names
from kvconv.custom_ops.triton.arguments import ARGUMENTS, NAMES
from kvconv.custom_ops.triton.compile import Compiled
from kvconv.custom_ops.triton.variants import Attention, Feature, Kind, sort_key
from kvconv.errors import BundleError

MAGIC = b"KVCKERN\0"
VERSION = 1
CUBIN, PTX = 1, 2
_HEADER = struct.Struct("<8sIIQ32sQ")
_ENTRY = struct.Struct("<18IQQ32s96s64s40x")
_IMAGE_ALIGNMENT = 64


class Entry(NamedTuple):
    """A kernel of a pack.

    Attributes:
        kind: What it does.
        format: `CUBIN` or `PTX`.
        compute_capability: What it was compiled for; the least that runs PTX.
        attention: For which nodes.
        num_warps: Warps of a block.
        shared_bytes: Shared memory of a block.
        tile_m: New tokens of a program.
        tile_n: Slots of a step.
        registers: Of a thread; 0 for PTX.
        spill_bytes: Local memory of a thread; 0 for PTX.
        function: The name in the image.
        arguments: What it takes, in order.
        image: Machine code, or text with a final zero.
    """

    kind: Kind
    format: int
    compute_capability: int
    attention: Attention
    num_warps: int
    shared_bytes: int
    tile_m: int
    tile_n: int
    registers: int
    spill_bytes: int
    function: str
    arguments: tuple[str, ...]
    image: bytes


def write_pack(kernels: Iterable[Compiled]) -> bytes:
    """Return the file's content; the order in which kernels come does not matter."""
    ordered = sorted(kernels, key=lambda kernel: sort_key(kernel.variant))
    images = bytearray()
    table = bytearray()
    images_start = _HEADER.size + _ENTRY.size * len(ordered)
    for kernel in ordered:
        images += bytes(-(images_start + len(images)) % _IMAGE_ALIGNMENT)
        table += _pack_entry(kernel, images_start + len(images))
        images += kernel.image
    body = bytes(table + images)
    digest = hashlib.sha256(body).digest()
    return _HEADER.pack(MAGIC, VERSION, len(ordered), _HEADER.size + len(body), digest, 0) + body


def _pack_entry(kernel: Compiled, offset: int) -> bytes:
    variant = kernel.variant
    function = kernel.function.encode()
    if len(function) >= 96:
        raise ValueError(f"the function's name has {len(function)} bytes; 95 can be")
    return _ENTRY.pack(
        variant.kind,
        PTX if variant.is_ptx else CUBIN,
        variant.gpu.compute_capability,
        *map(int, variant.attention),
        kernel.num_warps,
        kernel.shared_bytes,
        variant.tile.m,
        variant.tile.n,
        kernel.registers,
        kernel.spill_bytes,
        len(variant.arguments),
        0,
        offset,
        len(kernel.image),
        hashlib.sha256(kernel.image).digest(),
        function,
        bytes(ARGUMENTS[name].id for name in variant.arguments),
    )


def read_pack(content: bytes) -> list[Entry]:
    """Return a file's kernels.

    Args:
        content: The whole file.

    Raises:
        BundleError: It is not as it was written; says where.
    """
    if len(content) < _HEADER.size:
        raise _damaged(f"it has {len(content)} bytes, and its header alone {_HEADER.size}")
    magic, version, num_kernels, size, digest, _ = _HEADER.unpack_from(content)
    if magic != MAGIC:
        raise _damaged("it does not begin as a file of kernels does")
    if version != VERSION:
        raise _damaged(f"it has version {version}; this kvconv reads version {VERSION}")
    if size != len(content):
        raise _damaged(f"it has {len(content)} bytes, and its header says {size}")
    if hashlib.sha256(content[_HEADER.size :]).digest() != digest:
        raise _damaged("its sha256 is not what its header says")
    table_end = _HEADER.size + num_kernels * _ENTRY.size
    if table_end > len(content):
        raise _damaged(f"{len(content)} bytes do not hold a table of {num_kernels} kernels")
    return [_read_entry(content, index, table_end) for index in range(num_kernels)]


def _read_entry(content: bytes, index: int, table_end: int) -> Entry:
    fields = _ENTRY.unpack_from(content, _HEADER.size + index * _ENTRY.size)
    offset, size, digest, function, ids = fields[18:]
    image = content[offset : offset + size]
    if offset % _IMAGE_ALIGNMENT or offset < table_end or len(image) != size:
        raise _damaged(f"kernel {index} is said to be {size} bytes at {offset} of {len(content)}")
    if hashlib.sha256(image).digest() != digest:
        raise _damaged(f"kernel {index} has another sha256 than its table says")
    try:
        return Entry(
            kind=Kind(fields[0]),
            format=fields[1],
            compute_capability=fields[2],
            attention=Attention._make((*fields[3:9], Feature(fields[9]))),
            num_warps=fields[10],
            shared_bytes=fields[11],
            tile_m=fields[12],
            tile_n=fields[13],
            registers=fields[14],
            spill_bytes=fields[15],
            function=function.partition(b"\0")[0].decode(),
            arguments=tuple(NAMES[number] for number in ids[: fields[16]]),
            image=image,
        )
    except (KeyError, ValueError) as error:
        raise _damaged(f"kernel {index} has something unknown: {error}") from error


def _damaged(what: str) -> BundleError:
    return BundleError(
        f"{names.KERNELS_FILE} is damaged: {what}. Run kvconv build on the bundle again, or export "
        f"it again.",
        file=names.KERNELS_FILE,
    )

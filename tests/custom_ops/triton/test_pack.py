"""The file of kernels: what is written is read, by Python and by the op library."""

import hashlib
import struct

import pytest

from kvconv.bench.bare_op import BareOp
from kvconv.custom_ops.triton.compile import Compiled
from kvconv.custom_ops.triton.pack import CUBIN, PTX, read_pack, write_pack
from kvconv.custom_ops.triton.variants import Attention, Feature, Kind, list_variants
from kvconv.errors import BundleError, KvconvError

ATTENTION = Attention(10, 2, 96, 64, 3, 32, Feature.ROTARY | Feature.MASK | Feature.CAUSAL)


@pytest.fixture
def kernels():
    return [
        Compiled(
            variant,
            b"text\0" if variant.is_ptx else bytes([number]) * (100 + number),
            f"{variant.kind.name.lower()}_kernel",
            8,
            1000 + number,
            200 + number,
            number,
        )
        for number, variant in enumerate(list_variants([ATTENTION], ["sm_80", "sm_90"]))
    ]


def complaint_of_the_library(content):
    """What the op says of a file; where it likes it, it goes on to look for a driver."""
    with pytest.raises(KvconvError) as refusal:
        BareOp(
            activation=10,
            cache=2,
            attributes={"num_heads": 3, "kv_num_heads": 1},
            kernels=content,
            allocate=lambda size: 0,
            free=lambda address: None,
        ).close()
    return str(refusal.value)


def test_pack_that_is_read_holds_what_was_written(kernels):
    entries = read_pack(write_pack(kernels))
    assert len(entries) == len(kernels)
    for entry, kernel in zip(entries, kernels, strict=True):
        variant = kernel.variant
        assert entry.kind is variant.kind
        assert entry.attention == ATTENTION
        assert entry.compute_capability == variant.gpu.compute_capability
        assert entry.format == (PTX if variant.is_ptx else CUBIN)
        assert (entry.tile_m, entry.tile_n) == variant.tile[:2]
        assert entry.arguments == variant.arguments
        assert (entry.num_warps, entry.shared_bytes) == (8, kernel.shared_bytes)
        assert (entry.registers, entry.spill_bytes) == kernel[5:]
        assert (entry.image, entry.function) == (kernel.image, kernel.function)


def test_op_library_accepts_the_pack_and_refuses_it_once_a_bit_is_turned(kernels):
    content = write_pack(kernels)
    assert "driver" in complaint_of_the_library(content)
    turned = bytearray(content)
    turned[-1] ^= 1
    assert "damaged" in complaint_of_the_library(bytes(turned))
    assert "cut short" in complaint_of_the_library(content[:-1])


def test_order_of_kernels_does_not_matter(kernels):
    assert write_pack(kernels[::-1]) == write_pack(kernels)


def test_images_begin_at_multiples_of_64_one_after_the_other(kernels):
    content = write_pack(kernels)
    end = 64 + 320 * len(kernels)
    for index, kernel in enumerate(kernels):
        start, size = struct.unpack_from("<QQ", content, 64 + 320 * index + 72)
        assert start % 64 == 0
        assert content[end:start] == bytes(start - end)
        assert start - end < 64
        assert content[start : start + size] == kernel.image
        end = start + size
    assert end == len(content)


def sealed(content):
    """The content with the sha256 of its header mended, so that deeper checks are reached."""
    content = bytearray(content)
    content[24:56] = hashlib.sha256(content[64:]).digest()
    return bytes(content)


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, b"X", "does not begin as a file of kernels"),
        (8, b"\2", "it has version 2; this kvconv reads version 1"),
        (12, b"\xff\xff", "do not hold a table of 65535 kernels"),
        (16, b"\0\0", "its header says"),
        (24, b"\0\0\0", "its sha256 is not what its header says"),
        (64, b"\7", "kernel 0 has something unknown: 7 is not a valid Kind"),
        (64 + 72, b"\1", "kernel 0 is said to be"),
        (64 + 88, b"\0\0\0", "kernel 0 has another sha256"),
        (64 + 216, b"\x63", "kernel 0 has something unknown: 99"),
    ],
)
def test_damaged_pack_is_refused_by_both_readers(kernels, position, value, words):
    content = bytearray(write_pack(kernels))
    content[position : position + len(value)] = value
    damaged = sealed(content) if position >= 64 or position == 12 else bytes(content)
    with pytest.raises(BundleError, match=words) as refusal:
        read_pack(damaged)
    assert refusal.value.file == "kvconv_kernels.bin"
    assert "the kernel pack" in complaint_of_the_library(damaged)


def test_short_file_is_refused():
    with pytest.raises(BundleError, match="it has 3 bytes, and its header alone 64"):
        read_pack(b"KVC")


def test_kinds_are_in_the_order_of_the_op(kernels):
    assert [entry.kind for entry in read_pack(write_pack(kernels))] == sorted(
        kind for kind in Kind for _ in range(3)
    )

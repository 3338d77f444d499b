"""Kernel packs for tests, written from the format: images are PTX that declares parameters."""

import hashlib
import struct
from dataclasses import dataclass

KINDS = {"append": 1, "prefill": 2, "decode": 3, "combine": 4}
FEATURES = {
    "rotary": 1, "rotary_interleaved": 2, "mask": 4, "bias": 8, "alibi": 16, "sink": 32,
    "softcap": 64, "window": 128, "ring": 256, "causal": 512,
}  # fmt: skip
ARGUMENTS = {
    "query": 1, "key": 2, "value": 3, "present_key": 4, "present_value": 5,
    "present_key_scale": 6, "present_value_scale": 7, "attention_mask": 8, "cos": 9, "sin": 10,
    "attention_bias": 11, "alibi_slopes": 12, "head_sink": 13, "past_sequence_length": 14,
    "output": 15, "partial_output": 16, "partial_maximum": 17, "partial_sum": 18,
    "query_token_stride": 32, "key_token_stride": 33, "value_token_stride": 34,
    "sequence_length": 40, "capacity": 41, "mask_width": 42, "num_heads": 43, "kv_num_heads": 44,
    "rotary_batch_stride": 45, "bias_stride_batch": 46, "bias_stride_head": 47,
    "bias_stride_query": 48, "bias_stride_slot": 49, "window_size": 50, "num_splits": 51,
    "slots_per_split": 52, "scale": 64, "softcap": 65,
}  # fmt: skip
_PTX, _LEAST_CAPABILITY = 2, 80


@dataclass(frozen=True)
class TestKernel:
    """An entry; types are ONNX's."""

    __test__ = False

    kind: str
    activation: int
    cache: int
    head_dim: int
    value_head_dim: int
    group: int
    rotary_dim: int
    features: frozenset[str]
    num_warps: int = 4
    shared_bytes: int = 0
    tile_m: int = 16
    tile_n: int = 16
    arguments: tuple[str, ...] = tuple(ARGUMENTS)

    @property
    def ptx(self) -> bytes:
        """A kernel of these parameters, and of Triton's two, that does nothing."""
        kinds = ["u64" if ARGUMENTS[a] < 32 else "u32" if ARGUMENTS[a] < 64 else "f32"
                 for a in self.arguments]  # fmt: skip
        parameters = ",\n".join(
            f".param .{kind} p{i}" for i, kind in enumerate([*kinds, *["u64"] * 2])
        )
        return f".visible .entry {self.kind}({parameters})\n{{ ret; }}\n".encode() + b"\0"


def write_pack(kernels: list[TestKernel]) -> bytes:
    """Return the bytes of a pack."""
    offset, table, images = 64 + 320 * len(kernels), b"", b""
    for k in kernels:
        padding = -(offset + len(images)) % 64
        images += bytes(padding)
        table += struct.pack(
            "<18I2Q32s96s64s40x",
            *(KINDS[k.kind], _PTX, _LEAST_CAPABILITY, k.activation, k.cache),
            *(k.head_dim, k.value_head_dim, k.group, k.rotary_dim),
            sum(FEATURES[feature] for feature in k.features),
            *(k.num_warps, k.shared_bytes, k.tile_m, k.tile_n, 0, 0, len(k.arguments), 0),
            *(offset + len(images), len(k.ptx), hashlib.sha256(k.ptx).digest()),
            k.kind.encode(),
            bytes(ARGUMENTS[name] for name in k.arguments),
        )
        images += k.ptx
    body = table + images
    digest = hashlib.sha256(body).digest()
    header = struct.pack("<8sIIQ32s8x", b"KVCKERN\0", 1, len(kernels), 64 + len(body), digest)
    return header + body

"""A quantised weight in the graph: its tensors, and the operators that read them.

kvconv's own operators and ONNX Runtime's take the same bytes for q and differ in the rest:

| | kvconv | com.microsoft |
|---|---|---|
| q | uint8 [N, num_blocks * block_size * bits / 8] | [N, num_blocks, block_size * bits / 8] |
| scales | [N, num_blocks] float16 | of the activations' type |
| zero points | as scales, any number | uint8, two to a byte where bits is 4 |

ONNX Runtime's GatherBlockQuantized reads q as it is, [V, num_blocks, ..] with the last axis
quantised; its scales and zero points have that rank too, so they are stored twice there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from kvconv import names
from kvconv.converter.blocks import Blocks, ZeroPoints, quantize
from kvconv.converter.linear_weight import Rows
from kvconv.errors import ExportError


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight is quantised; see `kvconv.converter.blocks`."""

    bits: int
    block_size: int
    zero_points: ZeroPoints

    def __str__(self) -> str:
        return f"{self.bits} bits, blocks of {self.block_size}"


_MIN_HALF_SCALE, _MAX_HALF_SCALE = 2.0**-14, 2.0**15
"""Largest scale of a weight for which float16 serves: a normal number, with room above."""
_SAMPLED_ROWS = 256
_ROUNDED_WEIGHTS = 2**23
"""Weights rounded at once in PyTorch's memory."""
_TORCH = {ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16}


class NBitsWeight:
    """A weight [N, K] that is quantised when the first of its tensors is written.

    Attributes:
        name: The weight's name in the checkpoint.
        out_features: N.
        in_features: K.
        form: Bits, block size and zero points.
        bits: 8 or 4.
        block_size: Weights that share a scale.
        own_ops: Whether kvconv's operators read it.
        dtype: The activations' type.
    """

    def __init__(
        self,
        *,
        name: str,
        rows: Sequence[Rows],
        out_features: int,
        in_features: int,
        dtype: ir.DataType,
        form: Form,
        own_ops: bool,
    ) -> None:
        """Plan the tensors; nothing is quantised yet.

        Args:
            name: See the attributes, as for those not told here.
            rows: Give views of PyTorch's memory, [.., K]; one below the other they are the weight.
            out_features: N.
            in_features: K.
            dtype: Float type of the weight and of what it multiplies.
            form: Bits, block size and zero points.
            own_ops: Whether kvconv's operators read it.

        Raises:
            ExportError: The weight holds infinities or NaN.
        """
        self.name, self.out_features, self.in_features = name, out_features, in_features
        self.form, self.bits, self.block_size = form, form.bits, form.block_size
        self.own_ops, self.dtype = own_ops, dtype
        self._rows = rows
        self._scale_dtype = self._choose_scale_dtype() if own_ops else dtype
        self._values: dict[str, ir.Value] = {}
        self._pending: dict[str, npt.NDArray[np.generic]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.in_features // self.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors asked for so far."""
        return sum(value.const_value.nbytes for value in self._values.values() if value.const_value)

    def operands(self) -> list[ir.Value | None]:
        """Return q, scales and zero points (None where all are the middle) for a product."""
        return [self._value("q"), self._value("scales"), self._zero_points("zero_points")]

    def gather_operands(self) -> list[ir.Value | None]:
        """Return the same for GatherBlockQuantized; q is the very same value."""
        if self.own_ops:
            return self.operands()
        zero_points = self._zero_points("row_zero_points")
        return [self._value("q"), self._value("row_scales"), zero_points]

    def loss(self) -> float:
        """Return the error of a sample of the rows, in parts of their size."""
        rows = self._weight()
        rows = rows[:: max(1, len(rows) // _SAMPLED_ROWS)].float()
        found = self._blocks(rows).dequantize(self.bits)[:, : self.in_features]
        return float((found - rows).norm() / rows.norm().clamp(min=torch.finfo().tiny))

    def round(self) -> None:
        """Put into PyTorch's memory what the bits will say, for a model with the same weights."""
        step = max(1, _ROUNDED_WEIGHTS // self.in_features)
        for rows in self._rows:
            memory = rows()
            for start in range(0, len(memory), step):
                part = memory[start : start + step]
                blocks = self._blocks(torch.from_numpy(np.require(part, requirements=["C", "W"])))
                values = blocks.dequantize(self.bits)[:, : self.in_features]
                np.copyto(part, values.numpy(), casting="same_kind")

    def register(self, graph: ir.Graph) -> None:
        """Give the graph the tensors, one after the other, so that they are written together."""
        for value in self._values.values():
            graph.register_initializer(value)

    def _zero_points(self, part: str) -> ir.Value | None:
        return None if self.form.zero_points == "none" else self._value(part)

    def _value(self, part: str) -> ir.Value:
        if part not in self._values:
            dtype, sizes = self._layout(part)
            shape, name = ir.Shape(sizes), f"{self.name}.{part}"
            lazy = ir.LazyTensor(self._tensor(part), dtype=dtype, shape=shape, name=name)
            self._values[part] = ir.Value(
                name=name, type=ir.TensorType(dtype), shape=shape, const_value=lazy
            )
        return self._values[part]

    def _layout(self, part: str) -> tuple[ir.DataType, list[int]]:
        rows, blocks = self.out_features, self.num_blocks
        blob = self.block_size * self.bits // 8
        zero_dtype = self._scale_dtype if self.own_ops else ir.DataType.UINT8
        packed = blocks if self.bits == 8 or self.own_ops else -(-blocks // 2)
        return {
            "q": (
                ir.DataType.UINT8,
                [rows, blocks * blob] if self.own_ops else [rows, blocks, blob],
            ),
            "scales": (self._scale_dtype, [rows, blocks]),
            "zero_points": (zero_dtype, [rows, packed]),
            "row_scales": (self._scale_dtype, [rows, blocks, 1]),
            "row_zero_points": (zero_dtype, [rows, blocks, 1]),
        }[part]

    def _tensor(self, part: str) -> Callable[[], ir.TensorProtocol]:
        def make() -> ir.TensorProtocol:
            if part not in self._pending:
                self._pending = self._quantize()
            dtype, sizes = self._layout(part)
            return ir.Tensor(self._pending.pop(part).reshape(sizes), dtype=dtype)

        return make

    def _quantize(self) -> dict[str, npt.NDArray[np.generic]]:
        blocks = self._blocks(self._weight())
        q, scales = blocks.q.numpy(), blocks.scales.numpy()
        parts = {"q": q if self.bits == 8 else _pack(q), "scales": scales, "row_scales": scales}
        if blocks.zero_points is not None:
            zeros = blocks.zero_points.numpy()
            parts["zero_points"] = zeros if self.own_ops or self.bits == 8 else _pack(zeros)
            parts["row_zero_points"] = zeros
        return {part: array for part, array in parts.items() if part in self._values}

    def _blocks(self, weight: torch.Tensor) -> Blocks:
        return quantize(
            weight,
            bits=self.bits,
            block_size=self.block_size,
            zero_points=self.form.zero_points,
            scale_dtype=_TORCH[self._scale_dtype],
        )

    def _weight(self) -> torch.Tensor:
        parts = [
            torch.from_numpy(np.require(rows(), requirements=["C", "W"])) for rows in self._rows
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choose_scale_dtype(self) -> ir.DataType:
        low, high = self._weight().float().aminmax()
        reach = float(torch.maximum(high, -low))
        if not np.isfinite(reach):
            raise ExportError(
                f"The weight {self.name} holds infinities or NaN, so it cannot be quantised. Check "
                f"the checkpoint, or export without --weights."
            )
        largest = reach / (2**self.bits - 1)
        fits = largest == 0 or _MIN_HALF_SCALE <= largest <= _MAX_HALF_SCALE
        return ir.DataType.FLOAT16 if fits else ir.DataType.FLOAT


def matmul(
    tape: ir.tape.Tape, x: ir.Value, weight: NBitsWeight, bias: ir.Value | None, accuracy_level: int
) -> ir.Value:
    """Add MatMulNBits to a tape: x [.., K] times a weight, plus a bias [N]; returns [.., N]."""
    operands = [x, *weight.operands()]
    operands += [bias] if weight.own_ops else [None, bias]  # com.microsoft has g_idx before it
    while operands[-1] is None:
        operands.pop()
    return tape.op(
        names.MATMUL_NBITS,
        operands,
        attributes={
            "K": weight.in_features,
            "N": weight.out_features,
            "bits": weight.bits,
            "block_size": weight.block_size,
            "accuracy_level": accuracy_level,
        },
        domain=_domain(weight),
    )


def gather(tape: ir.tape.Tape, indices: ir.Value, weight: NBitsWeight) -> ir.Value:
    """Add GatherBlockQuantized to a tape; returns [.., K] of the activations' type."""
    operands = [weight.gather_operands()[0], indices, *weight.gather_operands()[1:]]
    while operands[-1] is None:
        operands.pop()
    attributes: dict[str, int] = {"bits": weight.bits, "block_size": weight.block_size}
    if weight.own_ops:
        attributes["K"] = weight.in_features
        rows = tape.op(names.GATHER_NBITS, operands, attributes=attributes, domain=_domain(weight))
        if weight.dtype != ir.DataType.FLOAT:
            rows = tape.op("Cast", [rows], attributes={"to": weight.dtype})
        return rows
    assert indices.shape is not None
    attributes |= {"gather_axis": 0, "quantize_axis": 2}
    blocks = tape.op(names.GATHER_NBITS, operands, attributes=attributes, domain=_domain(weight))
    kept = [0] * len(indices.shape)
    width = weight.num_blocks * weight.block_size
    shape = tape.initializer(ir.tensor([*kept, width], name=f"{weight.name}.row_shape"))
    rows = tape.op("Reshape", [blocks, shape])
    if width == weight.in_features:
        return rows
    bounds = {"starts": 0, "ends": weight.in_features, "axes": len(kept)}
    ends = [
        tape.initializer(ir.tensor([value], name=f"{weight.name}.row_{name}"))
        for name, value in bounds.items()
    ]
    return tape.op("Slice", [rows, *ends])


def _domain(weight: NBitsWeight) -> str:
    return names.OP_DOMAIN if weight.own_ops else names.ORT_DOMAIN


def _pack(q: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Put two 4-bit numbers of a row into each byte, the first into the low half."""
    if q.shape[1] % 2:
        q = np.pad(q, ((0, 0), (0, 1)))
    return (q[:, ::2] | (q[:, 1::2] << 4)).astype(np.uint8)

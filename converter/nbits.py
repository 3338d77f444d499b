"""A quantised weight in the graph: its tensors, and the operators that read them.

kvconv's own operators and ONNX Runtime's have the same names. Where the numbers lie differs
(`kvconv.converter.nbits_layout`); kvconv's take scales of float16, and zero points of that type.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from kvconv import names
from kvconv.converter.blocks import Blocks, ZeroPoints, quantize
from kvconv.converter.float_weight import FloatWeight, as_tensor
from kvconv.converter.nbits_layout import Layout, Numbers, Part
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
_MIN_COARSE_SCALE = 2.0**-18
"""Largest scale of a weight down to which float16 will do. Random weights of 8 bits lose 6% more
there than with scales of float32; at 2^-22 it is 4 times as much."""
_TORCH = {ir.DataType.FLOAT: torch.float32, ir.DataType.FLOAT16: torch.float16}


class NBitsWeight:
    """A weight [N, K] that is quantised when the first of its tensors is written.

    Attributes:
        source: The weight itself.
        form: Bits, block size and zero points.
        num_blocks: Blocks of a row.
        own_ops: Whether kvconv's operators read it.
    """

    def __init__(self, source: FloatWeight, form: Form, *, own_ops: bool) -> None:
        """Plan the tensors; nothing is quantised yet.

        Args:
            source: See the attributes.
            form: As well.
            own_ops: As well.

        Raises:
            ExportError: ONNX Runtime's operators read a float16 weight too small for such scales.
        """
        self.source, self.form, self.own_ops = source, form, own_ops
        self.num_blocks = -(-source.in_features // form.block_size)
        self._scale_dtype = _scale_dtype(source, form, own_ops)
        self._layout = Layout(
            source.out_features, self.num_blocks, form.block_size, form.bits, own_ops
        )
        self._values: dict[Part, ir.Value] = {}
        self._pending: dict[Part, Numbers] = {}
        self._rounds = self._has_rounded = False

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
        rows = self.source.sample()
        found = self._dequantize(self._blocks(rows))
        return float((found - rows).norm() / rows.norm().clamp(min=torch.finfo().tiny))

    def round_when_written(self) -> None:
        """Have PyTorch's memory hold what the bits say from when they are written.

        For a model with the same weights. Nothing reads the weight anew after that: blocks of what
        was rounded are not always the same blocks.
        """
        self._rounds = True

    def register(self, graph: ir.Graph) -> None:
        """Give the graph the tensors, one after the other, so that they are written together."""
        for value in self._values.values():
            graph.register_initializer(value)

    def _zero_points(self, part: Part) -> ir.Value | None:
        return None if self.form.zero_points == "none" else self._value(part)

    def _value(self, part: Part) -> ir.Value:
        if part not in self._values:
            dtype, name = self._dtype(part), f"{self.source.name}.{part}"
            shape = ir.Shape(self._layout.sizes(part))
            lazy = ir.LazyTensor(self._tensor(part), dtype=dtype, shape=shape, name=name)
            self._values[part] = ir.Value(
                name=name, type=ir.TensorType(dtype), shape=shape, const_value=lazy
            )
        return self._values[part]

    def _dtype(self, part: Part) -> ir.DataType:
        is_integer = part == "q" or (part.endswith("zero_points") and not self.own_ops)
        return ir.DataType.UINT8 if is_integer else self._scale_dtype

    def _tensor(self, part: Part) -> Callable[[], ir.TensorProtocol]:
        def make() -> ir.TensorProtocol:
            if part not in self._pending:
                self._pending = self._quantize()
            return ir.Tensor(self._pending.pop(part), dtype=self._dtype(part))

        return make

    def _quantize(self) -> dict[Part, Numbers]:
        """Return the tensors that were asked for; only these ever hold the whole weight."""
        assert not self._has_rounded, f"{self.source.name} is read again after it was rounded"
        tensors: dict[Part, Numbers] = {
            part: np.zeros(self._layout.sizes(part), self._dtype(part).numpy())
            for part in self._values
        }
        start = 0
        for rows in self.source.chunks():
            blocks = self._blocks(as_tensor(rows))
            for part, tensor in tensors.items():
                numbers = blocks.q if part == "q" else blocks.scales
                if part.endswith("zero_points"):
                    assert blocks.zero_points is not None
                    numbers = blocks.zero_points
                self._layout.put(part, tensor, start, numbers.numpy())
            if self._rounds:
                np.copyto(rows, self._dequantize(blocks).numpy(), casting="same_kind")
            start += len(rows)
        self._has_rounded = self._rounds
        return tensors

    def _blocks(self, weight: torch.Tensor) -> Blocks:
        return quantize(
            weight,
            bits=self.form.bits,
            block_size=self.form.block_size,
            zero_points=self.form.zero_points,
            scale_dtype=_TORCH[self._scale_dtype],
        )

    def _dequantize(self, blocks: Blocks) -> torch.Tensor:
        return blocks.dequantize(self.form.bits)[:, : self.source.in_features]


def _scale_dtype(weight: FloatWeight, form: Form, own_ops: bool) -> ir.DataType:
    """Return float16 where it serves kvconv's operators; ONNX Runtime's want the activations'."""
    largest = weight.reach / (2**form.bits - 1)
    if own_ops:
        fits = largest == 0 or _MIN_HALF_SCALE <= largest <= _MAX_HALF_SCALE
        return ir.DataType.FLOAT16 if fits else ir.DataType.FLOAT
    if weight.dtype == ir.DataType.FLOAT16 and 0 < largest < _MIN_COARSE_SCALE:
        raise ExportError(
            f"The weight {weight.name} reaches no farther than {weight.reach:.1e} from zero, so "
            f"its scales are at most {largest:.1e}. ONNX Runtime's operators want them in float16 "
            f"here, which has few digits below {_MIN_COARSE_SCALE:.1e}. Take --dtype float32 or "
            f"--attention flash."
        )
    return weight.dtype


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
            "K": weight.source.in_features,
            "N": weight.source.out_features,
            "bits": weight.form.bits,
            "block_size": weight.form.block_size,
            "accuracy_level": accuracy_level,
        },
        domain=_domain(weight),
    )


def gather(tape: ir.tape.Tape, indices: ir.Value, weight: NBitsWeight) -> ir.Value:
    """Add GatherBlockQuantized to a tape; returns [.., K] of the activations' type."""
    operands = [weight.gather_operands()[0], indices, *weight.gather_operands()[1:]]
    while operands[-1] is None:
        operands.pop()
    source, form = weight.source, weight.form
    attributes: dict[str, int] = {"bits": form.bits, "block_size": form.block_size}
    if weight.own_ops:
        attributes |= {"K": source.in_features, "N": source.out_features}
        rows = tape.op(names.GATHER_NBITS, operands, attributes=attributes, domain=_domain(weight))
        if source.dtype != ir.DataType.FLOAT:
            rows = tape.op("Cast", [rows], attributes={"to": source.dtype})
        return rows
    assert indices.shape is not None
    attributes |= {"gather_axis": 0, "quantize_axis": 2}
    blocks = tape.op(names.GATHER_NBITS, operands, attributes=attributes, domain=_domain(weight))
    kept = [0] * len(indices.shape)
    width = weight.num_blocks * form.block_size
    shape = tape.initializer(ir.tensor([*kept, width], name=f"{source.name}.row_shape"))
    rows = tape.op("Reshape", [blocks, shape])
    if width == source.in_features:
        return rows
    bounds = {"starts": 0, "ends": source.in_features, "axes": len(kept)}
    ends = [
        tape.initializer(ir.tensor([value], name=f"{source.name}.row_{name}"))
        for name, value in bounds.items()
    ]
    return tape.op("Slice", [rows, *ends])


def _domain(weight: NBitsWeight) -> str:
    return names.OP_DOMAIN if weight.own_ops else names.ORT_DOMAIN

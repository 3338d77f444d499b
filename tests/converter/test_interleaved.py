"""Columns of a projection are sorted into query, key and value where they lie head by head."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort
import pytest

from kvconv import names
from kvconv.converter.interleaved import sort_columns
from kvconv.converter.linear_weight import LinearWeight
from kvconv.converter.weights import save

HIDDEN, HEADS, WIDTH = 12, 4, 2
LEADING = [names.DIM_BATCH, names.DIM_SEQUENCE]


class Model:
    """A projection under construction; weights are [out_features, HIDDEN] as PyTorch has them."""

    def __init__(self, columns: int, *, has_bias: bool = True) -> None:
        random = np.random.default_rng(0)
        self.rows = random.standard_normal((columns, HIDDEN)).astype(np.float32)
        self.bias = random.standard_normal(columns).astype(np.float32)
        self.tape = ir.tape.Tape()
        kind = ir.TensorType(ir.DataType.FLOAT)
        self.x = ir.Input("x", shape=ir.Shape([*LEADING, HIDDEN]), type=kind)
        lazy = LinearWeight(
            "qkv.weight", [lambda: self.rows], [columns], in_features=HIDDEN,
            dtype=ir.DataType.FLOAT,
        )  # fmt: skip
        self.weight = ir.Value(name="qkv.weight", type=kind, shape=lazy.shape, const_value=lazy)
        self.initializers = [self.weight]
        self.projected = self.op("MatMul", [self.x, self.weight], [*LEADING, columns])
        if has_bias:
            bias = self.tape.initializer(ir.tensor(self.bias, name="qkv.bias"))
            self.projected = self.op("Add", [self.projected, bias], [*LEADING, columns])

    def ints(self, values: object) -> ir.Value:
        name = f"ints_{len(self.tape.initializers)}"
        return self.tape.initializer(ir.tensor(np.array(values, np.int64), name=name))

    def op(
        self,
        op: str,
        inputs: Sequence[ir.Value],
        shape: Sequence[int | str] | None,
        **attrs: object,
    ) -> ir.Value:
        value = self.tape.op(op, inputs, attributes=attrs)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        value.shape = None if shape is None else ir.Shape(shape)
        return value

    def split(self, x: ir.Value, axis: int, count: int) -> Sequence[ir.Value]:
        parts = self.tape.op_multi_out(
            "Split", [x], attributes={"axis": axis, "num_outputs": count}, num_outputs=count
        )
        for part in parts:
            part.type = ir.TensorType(ir.DataType.FLOAT)
        return parts

    def view(self, x: ir.Value, *sizes: int) -> ir.Value:
        return self.op("Reshape", [x, self.ints([0, 0, *sizes])], [*LEADING, *sizes])

    def cut(self, x: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        bounds = [self.ints([value]) for value in (start, end, axis, 1)]
        return self.op("Slice", [x, *bounds], None)

    def take(self, x: ir.Value, index: int, axis: int) -> ir.Value:
        """Index one axis with a list of one, as PyTorch's exporter spells it."""
        rank = len(x.shape or ())
        perm = [axis, *(i for i in range(rank) if i != axis)]
        moved = self.op("Transpose", [x], None, perm=perm)
        taken = self.op("GatherND", [moved, self.ints([[index]])], None)
        return self.op("Transpose", [taken], None, perm=[perm.index(i) for i in range(rank)])

    def finish(self, parts: Sequence[ir.Value]) -> ir.Model:
        outputs = [self.op("Tanh", [part], None) for part in parts]
        for index, output in enumerate(outputs):
            output.name = f"part_{index}"
        graph = ir.Graph(
            [self.x],
            outputs,
            nodes=self.tape.nodes,
            initializers=[*self.initializers, *self.tape.initializers],
            opset_imports={"": 23},
            name="projection",
        )
        return ir.Model(graph, ir_version=10)


def neox(m: Model) -> Sequence[ir.Value]:
    view = m.view(m.projected, HEADS, 3 * WIDTH)
    shape = [LEADING[0], HEADS, LEADING[1], 3 * WIDTH]
    return m.split(m.op("Transpose", [view], shape, perm=[0, 2, 1, 3]), 3, 3)


def bloom(m: Model) -> Sequence[ir.Value]:
    view = m.view(m.projected, HEADS, 3, WIDTH)
    return [m.op("Gather", [view, m.ints(index)], None, axis=3) for index in range(3)]


def falcon(m: Model) -> Sequence[ir.Value]:
    view = m.view(m.projected, HEADS + 2, WIDTH)
    whole = m.op("Slice", [view, *(m.ints([v]) for v in (0, 2**62, 1, 1))], view.shape)
    return [m.cut(whole, 0, -2, 2), m.take(whole, -2, 2), m.take(whole, -1, 2)]


def grouped(m: Model) -> Sequence[ir.Value]:
    view = m.view(m.projected, 2, HEADS, WIDTH)
    return [m.cut(view, 0, -2, 3), m.take(view, -2, 3), m.take(view, -1, 3)]


KINDS: dict[str, tuple[Callable[[Model], Sequence[ir.Value]], int]] = {
    "neox": (neox, 3 * HEADS * WIDTH),
    "bloom": (bloom, 3 * HEADS * WIDTH),
    "falcon": (falcon, (HEADS + 2) * WIDTH),
    "grouped": (grouped, 2 * HEADS * WIDTH),
}
"""Name -> how query, key and value are cut, and the number of columns."""


def run(model: ir.Model, folder: Path) -> list[npt.NDArray[np.float32]]:
    session = ort.InferenceSession(save(model, folder), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(1).standard_normal((2, 5, HIDDEN)).astype(np.float32)
    outputs: list[npt.NDArray[np.float32]] = session.run(None, {"x": x})
    return outputs


def ops(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_hold_the_same_numbers_behind_one_split(
    kind: str, has_bias: bool, tmp_path: Path
) -> None:
    cut, columns = KINDS[kind]
    found = []
    for is_sorted in (False, True):
        m = Model(columns, has_bias=has_bias)
        model = m.finish(cut(m))
        if is_sorted:
            assert sort_columns(model) == 1
            cuts = [op for op in ops(model) if op in ("Split", "Slice", "Gather", "GatherND")]
            assert cuts == ["Split"]
        folder = tmp_path / str(is_sorted)
        folder.mkdir()
        found.append(run(model, folder))
        if is_sorted:
            assert sort_columns(model) == 0
    for before, after in zip(*found, strict=True):
        assert before.shape == after.shape
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


def test_rows_are_views_so_that_rounding_reaches_the_model() -> None:
    cut, columns = KINDS["bloom"]
    m = Model(columns)
    sort_columns(m.finish(cut(m)))
    weight = m.weight.const_value
    assert isinstance(weight, LinearWeight)
    assert all(np.shares_memory(rows(), m.rows) for rows in weight.rows)
    # Head 1's query is the fourth block of the checkpoint and the second of the sorted weight.
    np.testing.assert_array_equal(weight.torch_layout()[2:4], m.rows[6:8])


def halves(m: Model) -> Sequence[ir.Value]:
    view = m.view(m.projected, HEADS, 6)
    return [m.cut(view, 0, 2, 3), m.cut(view, 2, 6, 3)]


def with_another_reader(m: Model) -> Sequence[ir.Value]:
    return [*bloom(m), m.projected]


def overlapping(m: Model) -> Sequence[ir.Value]:
    view = m.view(m.projected, HEADS, 3, WIDTH)
    return [m.op("Gather", [view, m.ints(index)], None, axis=3) for index in (0, 1, 1)]


def one_after_the_other(m: Model) -> Sequence[ir.Value]:
    return m.split(m.projected, 2, 3)


def mixed_with_tokens(m: Model) -> Sequence[ir.Value]:
    flat = m.op("Reshape", [m.projected, m.ints([-1, 3, WIDTH])], ["rows", 3, WIDTH])
    return [m.op("Gather", [flat, m.ints(index)], None, axis=1) for index in range(3)]


@pytest.mark.parametrize(
    "cut", [halves, with_another_reader, overlapping, one_after_the_other, mixed_with_tokens]
)
def test_other_projections_stay(cut: Callable[[Model], Sequence[ir.Value]]) -> None:
    m = Model(3 * HEADS * WIDTH)
    model = m.finish(cut(m))
    before = ops(model)
    assert sort_columns(model) == 0
    assert ops(model) == before


def test_weight_that_something_else_reads_stays() -> None:
    m = Model(3 * HEADS * WIDTH)
    parts = [*bloom(m), m.op("Abs", [m.weight], None)]
    assert sort_columns(m.finish(parts)) == 0

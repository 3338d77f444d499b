"""Linear weights on small graphs: which operator reads them afterwards, and what it computes."""

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from kvconv import custom_ops, names
from kvconv.converter.options import ExportOptions
from kvconv.converter.quantization import quantize
from kvconv.converter.weights import save
from kvconv.errors import ExportError

WIDTH, VOCAB_SIZE = 48, 96
FLAVOURS = ("flash", "standard")
RANDOM = np.random.default_rng(2)


def weight(*sizes: int) -> np.ndarray:
    return (RANDOM.normal(size=sizes) * 0.2).astype(np.float32)


def graph(nodes, weights, *, inputs=("x",), outputs=("y",), sizes=None) -> ir.Model:
    """Return a model over x [2, 3, WIDTH] and input_ids [2, 3]."""
    values = {
        "x": helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "tokens", WIDTH]),
        "narrow": helper.make_tensor_value_info("narrow", TensorProto.FLOAT, [2, 3, WIDTH - 8]),
        names.INPUT_IDS: helper.make_tensor_value_info(
            names.INPUT_IDS, TensorProto.INT64, ["batch", "tokens"]
        ),
    }
    known = {"y": ["batch", "tokens", None], names.LOGITS: ["batch", "tokens", VOCAB_SIZE]}
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [values[name] for name in inputs],
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, known[n]) for n in outputs],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
            value_info=[
                helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
                for name, shape in (sizes or {}).items()
            ],
        ),
        opset_imports=[helper.make_opsetid("", 23)],
        ir_version=10,
    )
    return ir.serde.deserialize_model(model)


def feeds() -> dict[str, np.ndarray]:
    return {
        "x": weight(2, 3, WIDTH) * 5,
        "narrow": weight(2, 3, WIDTH - 8) * 5,
        names.INPUT_IDS: RANDOM.integers(0, VOCAB_SIZE, (2, 3)),
    }


def run(model: ir.Model, folder, given) -> list[np.ndarray]:
    path = save(model, folder)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(custom_ops.library_path()))
    session = ort.InferenceSession(path, options)
    wanted = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in given.items() if name in wanted})


def both(tmp_path, make, options):
    """Run a graph as it is and quantised; return the outputs, the report and the nodes."""
    given = feeds()
    (tmp_path / "float").mkdir()
    (tmp_path / "bits").mkdir()
    model = make()
    before = run(model, tmp_path / "float", given)
    report, weights = quantize(model, options)
    after = run(model, tmp_path / "bits", given)
    nodes = onnx.load(tmp_path / "bits" / names.MODEL_FILE, load_external_data=False).graph.node
    return before, after, report, nodes


def assert_near(found, wanted, bits):
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert error < {4: 0.12, 8: 0.01}[bits]
    assert error > 1e-5  # it was quantised


@pytest.mark.parametrize("attention", FLAVOURS)
@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
@pytest.mark.parametrize("level", [None, 1, 4])
def test_matmul_with_a_bias_becomes_one_node(tmp_path, attention, weights, bits, level):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["b", "product"], ["y"]),
    ]
    values = {"w": weight(WIDTH, 64), "b": weight(64)}
    options = ExportOptions(weights=weights, attention=attention, accuracy_level=level)
    before, after, report, found = both(tmp_path, lambda: graph(nodes, values), options)
    assert [node.op_type for node in found] == [names.MATMUL_NBITS]
    assert_near(after[0], before[0], bits)
    assert report.float_bytes == WIDTH * 64 * 4
    assert report.left_bytes == {}


@pytest.mark.parametrize("attention", FLAVOURS)
@pytest.mark.parametrize("is_transposed", [0, 1])
def test_gemm_loses_its_reshapes(tmp_path, attention, is_transposed):
    nodes = [
        helper.make_node("Reshape", ["x", "rows"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w", "b"], ["product"], transB=is_transposed),
        helper.make_node("Reshape", ["product", "shape"], ["wide"]),
        helper.make_node("Relu", ["wide"], ["y"]),
    ]
    sizes = (64, WIDTH) if is_transposed else (WIDTH, 64)
    values = {"w": weight(*sizes), "b": weight(64)}
    values |= {"rows": np.array([-1, WIDTH]), "shape": np.array([2, 3, 64])}
    options = ExportOptions(weights="int4", attention=attention)
    shapes = {"wide": ["batch", "tokens", 64]}
    before, after, _, found = both(tmp_path, lambda: graph(nodes, values, sizes=shapes), options)
    assert [node.op_type for node in found] == [names.MATMUL_NBITS, "Relu"]
    assert_near(after[0], before[0], 4)


@pytest.mark.parametrize("attention", FLAVOURS)
@pytest.mark.parametrize("width", [64, WIDTH])
@pytest.mark.parametrize(("weights", "bits"), [("int4", 4), ("int8", 8)])
def test_tied_embedding_is_one_initializer(tmp_path, attention, width, weights, bits):
    nodes = [
        helper.make_node("Gather", ["w", names.INPUT_IDS], ["embedded"]),
        helper.make_node("Reshape", ["embedded", "rows"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["product"], transB=1),
        helper.make_node("Reshape", ["product", "shape"], [names.LOGITS]),
    ]
    values = {"w": weight(VOCAB_SIZE, width)}
    values |= {"rows": np.array([-1, width]), "shape": np.array([2, 3, VOCAB_SIZE])}

    def make():
        return graph(
            nodes,
            values,
            inputs=(names.INPUT_IDS,),
            outputs=(names.LOGITS,),
            sizes={"embedded": ["batch", "tokens", width]},
        )

    options = ExportOptions(weights=weights, attention=attention, pure=True)
    before, after, _, found = both(tmp_path, make, options)
    readers = Counter(name for node in found for name in node.input if name.endswith(".q"))
    assert readers == {"w.q": 2}
    error = np.linalg.norm(after[0] - before[0]) / np.linalg.norm(before[0])
    assert 1e-5 < error < {4: 0.2, 8: 0.02}[bits]


def attention_like(width: int = WIDTH) -> ir.Model:
    """Return a graph with a projection in front of attention, one behind, and an LM head."""
    nodes = [
        helper.make_node("MatMul", ["x", "qkv"], ["packed"]),
        helper.make_node("Transpose", ["packed"], ["turned"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["packed", "turned"], ["scores"]),
        helper.make_node("MatMul", ["scores", "packed"], ["attended"]),
        helper.make_node("MatMul", ["attended", "o"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "head"], [names.LOGITS]),
    ]
    values = {"qkv": weight(width, 64), "o": weight(64, 64), "head": weight(64, VOCAB_SIZE)}
    return graph(nodes, values, outputs=(names.LOGITS,))


def bits_by_weight(model: ir.Model) -> dict[str, tuple[int, int]]:
    return {
        node.inputs[1].name.removesuffix(".q"): (
            node.attributes.get_int("bits"),
            node.attributes.get_int("block_size"),
        )
        for node in model.graph
        if node.op_type == names.MATMUL_NBITS
    }


def test_sensitive_weights_that_lose_much_have_8_bits():
    model = attention_like()
    quantize(model, ExportOptions(weights="int4"))
    assert bits_by_weight(model) == {"qkv": (8, 32), "o": (4, 16), "head": (8, 32)}


def test_weights_on_a_grid_stay_small():
    model = attention_like(64)
    for name in ("qkv", "o", "head"):
        value = model.graph.initializers[name]
        q = np.tile(np.arange(16, dtype=np.float32), value.const_value.shape[0] // 16)
        array = np.tile(q[:, None] * 0.25 - 1.5, value.const_value.shape[1])
        value.const_value = ir.Tensor(array.astype(np.float32), name=name)
    quantize(model, ExportOptions(weights="int4"))
    assert set(bits_by_weight(model).values()) == {(4, 32)}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"pure": True}, {"qkv": (4, 32), "o": (4, 32), "head": (4, 32)}),
        ({"pure": True, "block_size": 64}, {"qkv": (4, 64), "o": (4, 64), "head": (4, 64)}),
        ({"block_size": 32}, {"qkv": (8, 32), "o": (4, 32), "head": (8, 32)}),
        ({"weights": "int8"}, {"qkv": (8, 32), "o": (8, 32), "head": (8, 32)}),
        (
            {"weights": "int8", "accuracy_level": 4},
            {"qkv": (8, 16), "o": (8, 16), "head": (8, 16)},
        ),
        (
            {"weights": "int8", "block_size": 128},
            {"qkv": (8, 128), "o": (8, 128), "head": (8, 128)},
        ),
    ],
)
def test_what_is_asked_for_is_done(options, wanted):
    model = attention_like()
    quantize(model, ExportOptions(**{"weights": "int4"} | options))
    assert bits_by_weight(model) == wanted


def test_a_router_stays_float():
    nodes = [
        helper.make_node("MatMul", ["x", "router"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["chances"]),
        helper.make_node("TopK", ["chances", "k"], ["best", "which"]),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("ReduceSum", ["best", "axis"], ["weight"]),
        helper.make_node("Mul", ["z", "weight"], ["y"]),
    ]
    values = {"router": weight(WIDTH, 8), "w": weight(WIDTH, 64)}
    values |= {"k": np.array([2]), "axis": np.array([-1])}
    model = graph(nodes, values)
    report, _ = quantize(model, ExportOptions(weights="int4"))
    assert report.left_bytes == {"a router, which chooses experts": WIDTH * 8 * 4}
    assert report.float_bytes == WIDTH * 64 * 4


@pytest.mark.parametrize(
    ("shape", "what"),
    [([2, 4, 3, WIDTH], "head"), ([4, 6, WIDTH], "expert, all of which are computed")],
)
def test_a_stack_of_matrices_stays_float_and_says_what_it_is(shape, what):
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["parts"]),
        helper.make_node("MatMul", ["parts", "stack"], ["y"]),
    ]
    values = {"shape": np.array(shape), "stack": weight(4, WIDTH, 8)}
    model = graph(nodes, values, sizes={"parts": shape})
    report, _ = quantize(model, ExportOptions(weights="int4"))
    assert report.left_bytes == {f"a stack of matrices, one for each {what}": 4 * WIDTH * 8 * 4}


@pytest.mark.parametrize("rows", [64, 4])
def test_a_table_stays_float_and_is_reported_unless_it_is_small(rows):
    nodes = [
        helper.make_node("Gather", ["positions", "which"], ["row"]),
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Add", ["z", "row"], ["y"]),
    ]
    values = {"positions": weight(rows, 64), "which": np.array(3), "w": weight(WIDTH, 64)}
    report, _ = quantize(graph(nodes, values), ExportOptions(weights="int4"))
    assert report.float_bytes == WIDTH * 64 * 4
    reason = "a table whose rows are not chosen by token ids alone"
    assert report.left_bytes == ({reason: rows * 64 * 4} if rows > 4 else {})


@pytest.mark.parametrize("attention", FLAVOURS)
def test_an_embedding_of_reshaped_token_ids_is_quantised(tmp_path, attention):
    """GPT-2 gives its ids two axes before it looks them up."""
    nodes = [
        helper.make_node("Reshape", [names.INPUT_IDS, "flat"], ["row"]),
        helper.make_node("Cast", ["row"], ["ids"], to=TensorProto.INT64),
        helper.make_node("Gather", ["wte", "ids"], ["embedded"]),
        helper.make_node("Reshape", ["embedded", "shape"], ["y"]),
    ]
    values = {"wte": weight(VOCAB_SIZE, 64)}
    values |= {"flat": np.array([1, -1]), "shape": np.array([2, 3, 64])}

    def make():
        sizes = {"embedded": [1, "rows", 64]}
        model = graph(nodes, values, inputs=(names.INPUT_IDS,), sizes=sizes)
        for node in model.graph:
            if node.op_type in ("Reshape", "Cast") and node.outputs[0].name != "y":
                node.outputs[0].shape = ir.Shape([1, "rows"])
        return model

    options = ExportOptions(weights="int4", attention=attention)
    before, after, report, found = both(tmp_path, make, options)
    assert names.GATHER_NBITS in {node.op_type for node in found}
    assert report.float_bytes == VOCAB_SIZE * 64 * 4
    assert report.left_bytes == {}
    assert_near(after[0], before[0], 4)


@pytest.mark.parametrize(("rows", "refused"), [(64, True), (2, False)])
def test_what_nobody_foresaw_is_refused_above_5_percent(rows, refused):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("Einsum", ["z", "strange"], ["y"], equation="bti,oi->bto"),
    ]
    model = graph(nodes, {"w": weight(WIDTH, 512), "strange": weight(rows, 512)})
    if not refused:
        report, _ = quantize(model, ExportOptions(weights="int4"))
        assert report.left_bytes == {"read by Einsum": rows * 512 * 4}
        return
    with pytest.raises(ExportError, match=r"57% of the linear weights .* read by Einsum"):
        quantize(model, ExportOptions(weights="int4"))


@pytest.mark.parametrize("attention", FLAVOURS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_name(attention, value):
    broken = weight(WIDTH, 64)
    broken[3, 5] = value
    model = graph([helper.make_node("MatMul", ["x", "layer.w"], ["y"])], {"layer.w": broken})
    with pytest.raises(ExportError, match=r"layer\.w holds infinities or NaN"):
        quantize(model, ExportOptions(weights="int4", attention=attention))


@pytest.mark.parametrize(("size", "scales"), [(1.0, "FLOAT16"), (1e-7, "FLOAT"), (1e7, "FLOAT")])
def test_scales_that_float16_cannot_hold_are_float32(size, scales):
    values = {"w": weight(WIDTH, 64) * np.float32(size)}
    model = graph([helper.make_node("MatMul", ["x", "w"], ["y"])], values)
    quantize(model, ExportOptions(weights="int4"))
    assert model.graph.initializers["w.scales"].const_value.dtype.name == scales
    assert np.isfinite(model.graph.initializers["w.scales"].const_value.numpy()).all()


@pytest.mark.parametrize(("reach", "refused"), [(2.0**-9, False), (2.0**-12, True), (0, False)])
def test_scales_that_float16_cannot_hold_are_refused_where_they_must_be_float16(reach, refused):
    values = {"layer.w": np.full((WIDTH, 64), reach, np.float16)}
    model = graph([helper.make_node("MatMul", ["x", "layer.w"], ["y"])], values)
    options = ExportOptions(weights="int8", dtype="float16", attention="standard")
    if not refused:
        quantize(model, options)
        assert model.graph.initializers["layer.w.scales"].dtype == ir.DataType.FLOAT16
        return
    with pytest.raises(ExportError, match=r"layer\.w .* 2\.4e-04 .* --dtype float32 or"):
        quantize(model, options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 20}, "block_size is 20; it is one of 16, 32, 64, 128, 256"),
        ({"block_size": 0}, "block_size is 0"),
        ({"accuracy_level": 3}, "accuracy_level is 3; it is one of 1, 2, 4"),
        ({"accuracy_level": 0}, "accuracy_level is 0"),
    ],
)
def test_a_value_that_does_not_exist_is_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        ExportOptions(weights="int4", **options)


def test_asymmetric_int8_is_refused():
    with pytest.raises(ExportError, match="int8 weights are symmetric"):
        ExportOptions(weights="int8", symmetric=False).quantization()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 64}, "--block-size 64 .* stay float32"),
        ({"pure": True, "dtype": "float16"}, "--pure .* stay float16"),
        ({"symmetric": True}, "--symmetric"),
        ({"symmetric": False}, "--asymmetric"),
        ({"accuracy_level": 4, "pure": True}, "--pure, --accuracy-level 4"),
        ({"pure": True, "weights": "int8"}, "--pure .* int8 ones all have 8"),
    ],
)
def test_an_option_for_other_weights_is_refused(options, words):
    with pytest.raises(ExportError, match=words):
        ExportOptions(**options).quantization()


@pytest.mark.parametrize("attention", ["standard", "gqa"])
def test_accuracy_level_that_the_operator_lacks_is_refused(attention):
    options = ExportOptions(weights="int4", attention=attention, accuracy_level=2)
    with pytest.raises(ExportError, match=f"level 2 .* {attention} flavour .* one of 1, 4"):
        options.quantization()


@pytest.mark.parametrize("attention", FLAVOURS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_pytorchs_memory_gives_what_is_stored(tmp_path, attention, symmetric):
    """The reference of verification: the float graph over rounded weights equals the bits.

    Blocks that the width does not fill, and coarse ones, are not found again in what was rounded.
    """
    memory = weight(WIDTH - 8, 512)
    before = memory.copy()
    model = graph(
        [helper.make_node("MatMul", ["narrow", "w"], ["y"])], {"w": memory}, inputs=("narrow",)
    )
    model.graph.initializers["w"].const_value = ir.Tensor(memory, name="w")
    options = {"attention": attention, "symmetric": symmetric, "accuracy_level": 1, "pure": True}
    _, weights = quantize(model, ExportOptions(weights="int4", **options))
    for each in weights:
        each.round_when_written()
    given = feeds()
    (tmp_path / "bits").mkdir()
    (found,) = run(model, tmp_path / "bits", given)
    assert not np.array_equal(memory, before)
    np.testing.assert_allclose(found, given["narrow"] @ memory, atol=1e-5)

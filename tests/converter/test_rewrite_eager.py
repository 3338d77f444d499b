"""Attention spelled with MatMul and Softmax: what becomes a placeholder, and what must not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from kvconv import names
from kvconv.converter.rewrite import rewrite
from kvconv.converter.rewrite.graph import Editor, as_bias, cast, find, replace_uses
from kvconv.errors import RewriteError
from rewrite_graphs import (
    bool_mask,
    decoder,
    make_feeds,
    make_mask,
    open_session,
    run,
    run_traced,
)
from tolerances import assert_close

LOWEST = float(np.finfo(np.float32).min)


class Speller:
    """Spells the placeholder of a one-layer decoder out; each method is one stage.

    Subclasses replace a stage by another spelling, or by something that is no attention.
    """

    def __init__(self, graph: gs.Graph) -> None:
        self.graph, self.editor = graph, Editor(graph)
        (self.node,) = find(graph, names.TRACE_ATTENTION, names.TRACE_DOMAIN)
        self.attrs = dict(self.node.attrs)
        self.query, self.key, self.value, self.mask = self.node.inputs[:4]
        self.dtype = self.query.dtype
        heads, head_dim = self.attrs["num_heads"], self.attrs["head_dim"]
        self.query.shape = [names.DIM_BATCH, heads, names.DIM_SEQUENCE, head_dim]

    def add(self, op: str, *inputs: gs.Tensor, **attrs: Any) -> gs.Variable:
        """Append a node whose output has the first input's type and no known shape."""
        return self.editor.add(op, list(inputs), attrs, dtype=inputs[0].dtype)

    def number(self, value: float) -> gs.Constant:
        return self.editor.constant(np.array(value, self.dtype))

    def spell_out(self) -> gs.Graph:
        """Replace the placeholder."""
        scores = self.mask_scores(self.scale(self.product()))
        weights = self.softmax(scores)
        result = self.add("MatMul", weights, self.repeat(self.value))
        replace_uses(self.node.outputs[0], self.merge(result))
        self.node.inputs.clear()
        self.node.outputs.clear()
        return self.graph

    def repeat(self, heads: gs.Variable) -> gs.Variable:
        """[B,K,T,H] -> [B,N,T,H], each head as often as queries share it."""
        groups = self.attrs["num_heads"] // self.attrs["kv_num_heads"]
        if groups == 1:
            return heads
        kv_heads, width = heads.shape[1], heads.shape[3]
        column = self.add("Unsqueeze", heads, self.editor.ints(2))
        wide = self.add("Expand", column, self.editor.ints(1, 1, groups, 1, 1))
        return self.add("Reshape", wide, self.editor.ints(0, kv_heads * groups, -1, width))

    def product(self) -> gs.Variable:
        keys = self.add("Transpose", self.repeat(self.key), perm=[0, 1, 3, 2])
        return self.add("MatMul", self.query, keys)

    def scale(self, scores: gs.Variable) -> gs.Variable:
        return self.add("Mul", scores, self.number(self.attrs["scale"]))

    def mask_scores(self, scores: gs.Variable) -> gs.Variable:
        return self.add("Add", scores, as_bias(self.editor, self.mask, scores.dtype))

    def softmax(self, scores: gs.Variable) -> gs.Variable:
        return self.add("Softmax", scores, axis=-1)

    def merge(self, result: gs.Variable) -> gs.Variable:
        """[B,N,S,Hv] -> [B,S,N,Hv]."""
        return self.add("Transpose", result, perm=[0, 2, 1, 3])


class Where(Speller):
    """Divide by the root, then choose between scores and the lowest number."""

    def scale(self, scores: gs.Variable) -> gs.Variable:
        return self.add("Div", scores, self.number(1 / self.attrs["scale"]))

    def mask_scores(self, scores: gs.Variable) -> gs.Variable:
        masked = self.add("Not", self.mask)
        return self.editor.add("Where", [masked, self.number(LOWEST), scores], dtype=self.dtype)


class ScaledOperands(Speller):
    """Scale query and keys by the fourth root each, and never the scores."""

    def product(self) -> gs.Variable:
        root = self.number(self.attrs["scale"] ** 0.5)
        keys = self.add("Transpose", self.repeat(self.key), perm=[0, 1, 3, 2])
        query = self.editor.add("Mul", [self.query, root], dtype=self.dtype, shape=self.query.shape)
        return self.add("MatMul", query, self.add("Mul", keys, root))

    def scale(self, scores: gs.Variable) -> gs.Variable:
        return scores


class Merged(Speller):
    """Merge heads with the batch, add ALiBi there, and mask with heads apart (BLOOM)."""

    def product(self) -> gs.Variable:
        query = self._merge(self.query)
        keys = self.add("Transpose", self._merge(self.key), perm=[0, 2, 1])
        return self.add("MatMul", query, keys)

    def _merge(self, heads: gs.Variable) -> gs.Variable:
        shape = self.editor.add("Shape", [heads], {"start": 2}, dtype=np.int64, shape=[2])
        whole = self.editor.add(
            "Concat", [self.editor.ints(-1), shape], {"axis": 0}, dtype=np.int64, shape=[3]
        )
        return self.add("Reshape", heads, whole)

    def mask_scores(self, scores: gs.Variable) -> gs.Variable:
        heads = self.attrs["num_heads"]
        slopes = self.editor.constant(0.5 ** np.arange(heads, dtype=self.dtype).reshape(-1, 1))
        count = self.add("CumSum", self.editor.input(names.ATTENTION_MASK), self.editor.ints(1))
        row = self.add("Unsqueeze", cast(self.editor, count, self.dtype), self.editor.ints(1))
        alibi = self.add("Mul", row, slopes)  # [B,N,T]
        total = self.editor.dimension(names.ATTENTION_MASK, 1)
        shape = [self.editor.ints(-1, 1), total]
        whole = self.editor.add("Concat", shape, {"axis": 0}, dtype=np.int64, shape=[3])
        scores = self.add("Add", scores, self.add("Reshape", alibi, whole))
        apart = [self.editor.ints(-1, heads), self.editor.dimension(names.INPUT_IDS, 1), total]
        whole = self.editor.add("Concat", apart, {"axis": 0}, dtype=np.int64, shape=[4])
        return super().mask_scores(self.add("Reshape", scores, whole))

    def spell_out(self) -> gs.Graph:
        self.value = self._merge(self.value)
        return super().spell_out()

    def softmax(self, scores: gs.Variable) -> gs.Variable:
        return self._merge(super().softmax(scores))

    def merge(self, result: gs.Variable) -> gs.Variable:
        shape = [
            self.editor.ints(-1, self.attrs["num_heads"]),
            self.editor.dimension(names.INPUT_IDS, 1),
            self.editor.ints(self.attrs["value_head_dim"]),
        ]
        whole = self.editor.add("Concat", shape, {"axis": 0}, dtype=np.int64, shape=[4])
        return super().merge(self.add("Reshape", result, whole))


class Capped(Speller):
    """Bound the scores, with the scale and the bound as three factors."""

    def scale(self, scores: gs.Variable) -> gs.Variable:
        cap = self.number(self.attrs["softcap"])
        scores = self.add("Div", super().scale(scores), cap)
        return self.add("Mul", self.add("Tanh", scores), cap)


class Float32(Speller):
    """Compute the scores and the weights of a float16 model in float32."""

    def product(self) -> gs.Variable:
        self.query, self.key = (self._wide(heads) for heads in (self.query, self.key))
        self.dtype = np.dtype(np.float32)
        return super().product()

    def _wide(self, heads: gs.Variable) -> gs.Variable:
        wide = self.add("Cast", heads, to=np.float32)
        wide.dtype, wide.shape = np.dtype(np.float32), heads.shape
        return wide

    def softmax(self, scores: gs.Variable) -> gs.Variable:
        clamped = self.add("Max", super().mask_scores(scores), self.number(LOWEST))
        narrow = self.add("Cast", super().softmax(clamped), to=np.float16)
        narrow.dtype = np.dtype(np.float16)
        return narrow

    def mask_scores(self, scores: gs.Variable) -> gs.Variable:
        return scores


SPELLINGS: dict[str, tuple[type[Speller], dict[str, Any]]] = {
    "grouped heads": (Speller, {}),
    "single heads": (Speller, {"kv_heads": 4}),
    "one head": (Speller, {"kv_heads": 1}),
    "where": (Where, {}),
    "scaled operands": (ScaledOperands, {}),
    "softcap": (Capped, {"softcap": 1.5}),
    "float16": (Float32, {"dtype": np.float16}),
    "values of another width": (Speller, {"value_head_dim": 6}),
    "window": (Where, {"masks": (bool_mask(window=3),)}),
    "chunk": (Speller, {"masks": (bool_mask(chunk=4),)}),
}


@pytest.mark.parametrize(("spelling", "sizes"), SPELLINGS.values(), ids=SPELLINGS)
def test_eager_spelling_becomes_what_the_placeholder_becomes(
    spelling: type[Speller], sizes: dict[str, Any], tmp_path: Path
) -> None:
    called, spelled = decoder(**sizes), spelling(decoder(**sizes)).spell_out()
    traced = decoder(**sizes)
    reports = [rewrite(graph, attention="flash", opset=23) for graph in (called, spelled)]
    assert reports[1].counts["eager"] == 1
    (expected,), (node,) = (find(g, names.OP_NAME, names.OP_DOMAIN) for g in (called, spelled))
    scale = pytest.approx(expected.attrs.pop("scale"), rel=1e-6)
    assert node.attrs.pop("scale") == scale
    assert node.attrs == expected.attrs
    operands = [[tensor.is_empty() for tensor in n.inputs] for n in (node, expected)]
    assert operands[0] == operands[1]
    assert [tensor.inputs[0].op for tensor in node.inputs[:3]] == ["MatMul"] * 3
    assert node.outputs[0].outputs[0].op == "MatMul"
    session = open_session(spelled, tmp_path)
    dtype = "bfloat16" if sizes.get("dtype") else "float32"  # the sum of tensors of 11 bits each
    for past, new in ((0, 5), (6, 4)):
        mask = make_mask(past, new)
        wanted = run_traced(traced, make_feeds(traced, mask, new))["logits"].astype(np.float32)
        logits = run(session, make_feeds(spelled, mask, new, capacity=past + new + 3))["logits"]
        real = mask[:, past:] != 0
        assert_close(logits[real], wanted[real], dtype, f"past {past}: logits")


def test_eager_merged_heads_with_alibi_of_attended_slots_become_slopes(tmp_path: Path) -> None:
    spelled = Merged(decoder(kv_heads=4, style="none")).spell_out()
    standard = Merged(decoder(kv_heads=4, style="none")).spell_out()
    report = rewrite(spelled, attention="flash", opset=23)
    (node,) = find(spelled, names.OP_NAME, names.OP_DOMAIN)
    assert node.inputs[9].values.tolist() == [1.0, 0.5, 0.25, 0.125]
    assert (node.attrs["causal"], node.inputs[8].is_empty()) == (1, True)
    (refusal,) = report.refusals
    assert (refusal.rule, "holes" in refusal.reason) == ("mask", True)

    assert rewrite(standard, attention="standard", opset=23).refusals == ()
    (tmp_path / "flash").mkdir()
    flash, plain = open_session(spelled, tmp_path / "flash"), open_session(standard, tmp_path)
    mask = make_mask(6, 4)
    feeds = make_feeds(standard, mask, 4)
    (row, *_), (padded, *_), (holed, *_) = np.split(
        np.abs(run(flash, feeds)["logits"] - run(plain, feeds)["logits"]), 3
    )
    assert max(row.max(), padded.max()) < 1e-5
    assert holed.max() > 1e-3  # as the refusal says


@pytest.mark.parametrize(
    ("attention", "opset"), [("flash", 23), ("standard", 23), ("standard", 18)]
)
def test_eager_twice_changes_nothing(attention: Any, opset: int) -> None:
    graph = Where(decoder(opset=opset)).spell_out()
    assert rewrite(graph, attention=attention, opset=opset).counts["eager"] == 1
    once = gs.export_onnx(graph).SerializeToString()
    report = rewrite(graph, attention=attention, opset=opset)
    assert set(report.counts.values()) == {0}
    assert gs.export_onnx(graph).SerializeToString() == once


def replaced(**stages: Callable[[Speller, gs.Variable], gs.Variable]) -> type[Speller]:
    """Return a spelling with other stages; each takes what the stage gives, and spoils it."""

    def spoil(name: str) -> Callable[[Speller, gs.Variable], gs.Variable]:
        plain = getattr(Speller, name)
        return lambda self, tensor: stages[name](self, plain(self, tensor))

    return type("Spoiled", (Speller,), {name: spoil(name) for name in stages})


def as_output(speller: Speller, tensor: gs.Variable) -> gs.Variable:
    speller.graph.outputs.append(tensor)
    return tensor


def read_elsewhere(speller: Speller, tensor: gs.Variable) -> gs.Variable:
    return as_output(speller, speller.add("Neg", tensor)).inputs[0].inputs[0]


def by_the_largest(speller: Speller, tensor: gs.Variable) -> gs.Variable:
    """Multiply by a number that depends on the query."""
    return speller.add("Mul", tensor, speller.add("ReduceMax", speller.query, keepdims=0))


def by_the_mask(speller: Speller, tensor: gs.Variable) -> gs.Variable:
    return speller.add("Mul", tensor, cast(speller.editor, speller.mask, np.float32))


class OtherAxis(Speller):
    def softmax(self, scores: gs.Variable) -> gs.Variable:
        return self.add("Softmax", scores, axis=2)


class OtherHeads(Speller):
    """Let query head n read key head n modulo K."""

    def repeat(self, heads: gs.Variable) -> gs.Variable:
        row = self.add("Unsqueeze", heads, self.editor.ints(1))
        wide = self.add("Expand", row, self.editor.ints(1, 2, 1, 1, 1))
        return self.add("Reshape", wide, self.editor.ints(0, 4, -1, heads.shape[3]))


class NewValues(Speller):
    """Weigh new values only, where there are as many as cached ones."""

    def repeat(self, heads: gs.Variable) -> gs.Variable:
        return super().repeat(heads if heads is self.key else heads.inputs[0].inputs[1])


class KeysFirst(Speller):
    def product(self) -> gs.Variable:
        query = self.add("Transpose", self.query, perm=[0, 1, 3, 2])
        scores = self.add("MatMul", self.repeat(self.key), query)
        return self.add("Transpose", scores, perm=[0, 1, 3, 2])


class WeakWhere(Speller):
    def mask_scores(self, scores: gs.Variable) -> gs.Variable:
        return self.add("Where", self.mask, scores, self.number(-3.0))


class LearnedBias(Speller):
    """Add a bias of the weights file."""

    def mask_scores(self, scores: gs.Variable) -> gs.Variable:
        proto = onnx.helper.make_tensor("learned", 1, [1], np.zeros(1, np.float32))
        proto.data_location = onnx.TensorProto.EXTERNAL
        bias = gs.Constant("learned", gs.ir.tensor.LazyValues(proto), data_location=1)
        return self.add("Add", super().mask_scores(scores), bias)


NEAR_MISSES: dict[str, tuple[type[Speller], str]] = {
    "softmax over queries": (OtherAxis, "do not compute softmax"),
    "heads in another order": (OtherHeads, "do not compute softmax"),
    "values that are not cached": (NewValues, "by other than present.0.value"),
    "keys on the left": (KeysFirst, "multiplies keys by queries"),
    "weights are an output": (replaced(softmax=as_output), "is a graph output"),
    "scores are read elsewhere": (replaced(scale=read_elsewhere), "is read by 2 nodes"),
    "dropout": (
        replaced(softmax=lambda s, t: s.add("Dropout", t)),
        r"\(Dropout\) changes the weights behind the Softmax",
    ),
    "mask behind the softmax": (
        replaced(softmax=by_the_mask),
        r"\(Mul\) changes the weights behind the Softmax",
    ),
    "scale is computed": (replaced(scale=by_the_largest), "nor multiplies by a positive constant"),
    "scale is negative": (
        replaced(scale=lambda s, t: s.add("Mul", t, s.number(-1.0))),
        "nor multiplies by a positive constant",
    ),
    "scores divide": (
        replaced(scale=lambda s, t: s.add("Div", s.number(1.0), t)),
        "nor multiplies by a positive constant",
    ),
    "cap behind the mask": (
        replaced(mask_scores=lambda s, t: s.add("Tanh", t)),
        "bounds scores that are masked",
    ),
    "mask that does not mask": (WeakWhere, "makes scores -3.0"),
    "learned bias": (LearnedBias, "added to the weight learned"),
    "absolute scores": (
        replaced(scale=lambda s, t: s.add("Abs", t)),
        r"\(Abs\) neither masks scores nor multiplies",
    ),
}


@pytest.mark.parametrize(("spelling", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_eager_near_miss_is_refused_with_its_reason(spelling: type[Speller], reason: str) -> None:
    graph = spelling(decoder()).spell_out()
    with pytest.raises(RewriteError, match=reason) as caught:
        rewrite(graph, attention="flash", opset=23)
    assert (caught.value.expected, caught.value.found) == (1, 0)
    (refusal,) = caught.value.refusals
    assert refusal.startswith("eager: layer 0: ")


def test_eager_leaves_layers_with_a_placeholder_alone() -> None:
    report = rewrite(decoder(), attention="flash", opset=23)
    assert report.counts["eager"] == 0

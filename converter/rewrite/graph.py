"""What every rule needs of an onnx-graphsurgeon graph: editing, sorting, asking what feeds what.

Nothing here loads a constant whose bytes lie in the weights file. onnx-graphsurgeon's own helpers
for new layers and sorting are not used: the first looks at every tensor for each new node, the
second recurses once per node and overruns Python's stack on deep models.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs

from kvconv import names
from kvconv.cache_layout import GROUP_WIDTH
from kvconv.errors import RewriteError
from kvconv.manifest import CacheDtype, Provider

_SHARED_CONSTANT_BYTES = 1024
_OPERANDS = {name: index for index, name in enumerate(names.FLASH_ATTENTION_INPUTS)}
_PAST_PREFIX = names.past_key(0).partition("0")[0]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a rule left a match as it was.

    Attributes:
        rule: Name of the rule.
        node: Name of the node or tensor at fault.
        reason: One sentence.
    """

    rule: str
    node: str
    reason: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.node}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule did to a graph.

    Attributes:
        count: Times it fired.
        refusals: One per match that it left alone.
    """

    count: int
    refusals: tuple[Refusal, ...] = ()


class Editor:
    """Adds nodes and constants to a graph under names that are not taken.

    Attributes:
        graph: The graph being edited, in place.
        max_sequence_length: Most tokens a cache of this model will hold; None if not known.
        cache_dtype: How keys and values will be stored; None for what they are.
        provider: What the graph is for.
    """

    def __init__(
        self,
        graph: gs.Graph,
        *,
        max_sequence_length: int | None = None,
        cache_dtype: CacheDtype | None = None,
        provider: Provider = "cpu",
    ) -> None:
        self.graph = graph
        self.provider = provider
        self.max_sequence_length = max_sequence_length
        self.cache_dtype = cache_dtype
        self._names = set(graph.tensors()) | {node.name for node in graph.nodes}
        self._names |= {tensor.name for tensor in [*graph.inputs, *graph.outputs]}
        self._constants: dict[object, gs.Constant] = {}
        self._inputs = {tensor.name: tensor for tensor in graph.inputs}

    def input(self, name: str) -> gs.Variable:
        """Return a graph input.

        Raises:
            RewriteError: The graph has no input of that name.
        """
        if name not in self._inputs:
            raise RewriteError(
                f"The graph has no input {name!r}; it has {sorted(self._inputs)}. "
                f"Trace the model with kvconv's graph names."
            )
        return self._inputs[name]

    def add_input(self, name: str, dtype: npt.DTypeLike, shape: Sequence[int]) -> gs.Variable:
        """Return a graph input of that name, which is added where there is none."""
        if name not in self._inputs:
            self._inputs[name] = gs.Variable(name, np.dtype(dtype), list(shape))
            self._names.add(name)
            self.graph.inputs.append(self._inputs[name])
        return self._inputs[name]

    def constant(self, values: npt.NDArray[Any]) -> gs.Constant:
        """Return a constant; equal values share one."""
        key = (str(values.dtype), values.shape, values.tobytes())
        if key not in self._constants:
            self._constants[key] = gs.Constant(self.fresh("constant"), values)
        return self._constants[key]

    def ints(self, *values: int) -> gs.Constant:
        """Return an int64 [len(values)] constant."""
        return self.constant(np.array(values, np.int64))

    def dimension(self, name: str, axis: int) -> gs.Variable:
        """Return one dimension of a graph input, int64 [1]."""
        attrs = {"start": axis, "end": axis + 1}
        return self.add("Shape", [self.input(name)], attrs, dtype=np.int64, shape=[1])

    def add(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        attrs: Mapping[str, Any] | None = None,
        *,
        dtype: Any = None,
        shape: Sequence[int | str] | None = None,
    ) -> gs.Variable:
        """Append a node with one output and return that output."""
        output = gs.Variable(
            self.fresh(op),
            None if dtype is None else np.dtype(dtype),
            None if shape is None else list(shape),
        )
        self.add_node(op, inputs, [output], attrs)
        return output

    def add_node(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        outputs: Sequence[gs.Tensor],
        attrs: Mapping[str, Any] | None = None,
        *,
        domain: str | None = None,
    ) -> gs.Node:
        """Append a node that writes to given outputs."""
        node = gs.Node(
            op, self.fresh(f"node_{op}"), dict(attrs or {}), list(inputs), list(outputs), domain
        )
        self.graph.nodes.append(node)
        return node

    def fresh(self, stem: str) -> str:
        """Return a name that no tensor and no node has, and keep it."""
        number = 0
        while (name := f"kvconv/{stem}_{number}") in self._names:
            number += 1
        self._names.add(name)
        return name


def producer(tensor: gs.Tensor) -> gs.Node | None:
    """Return the node that computes a tensor; None for inputs and constants."""
    return tensor.inputs[0] if tensor.inputs else None


def is_external(tensor: gs.Tensor) -> bool:
    """Tell whether a tensor is a constant whose bytes lie in the weights file."""
    return isinstance(tensor, gs.Constant) and tensor.data_location == onnx.TensorProto.EXTERNAL


def is_past(tensor: gs.Tensor) -> bool:
    """Tell whether a tensor is one of the graph inputs that hold cached keys or values."""
    return tensor.name.startswith(_PAST_PREFIX)


def replace_uses(old: gs.Tensor, new: gs.Tensor) -> None:
    """Make every node that reads `old` read `new`; graph outputs stay as they are."""
    for node in list({id(node): node for node in old.outputs}.values()):
        for index, tensor in enumerate(node.inputs):
            if tensor is old:
                node.inputs[index] = new


def write_instead(old: gs.Variable, new: gs.Variable) -> None:
    """Make the node that computes `old` write `new`; the readers of `old` stay."""
    outputs = old.inputs[0].outputs
    outputs[next(i for i, tensor in enumerate(outputs) if tensor is old)] = new


def find(graph: gs.Graph, op: str, domain: str | None = None) -> list[gs.Node]:
    """Return the nodes of one operator, in graph order."""
    return [node for node in graph.nodes if node.op == op and (node.domain or "") == (domain or "")]


def optional_input(node: gs.Node, index: int) -> gs.Tensor | None:
    """Return an input of a node, or None where it is left out."""
    if index >= len(node.inputs) or node.inputs[index].is_empty():
        return None
    return node.inputs[index]


def get_operand(node: gs.Node, name: str) -> gs.Tensor | None:
    """Return an input of a FlashAttention node by its name; None where it is left out."""
    return optional_input(node, _OPERANDS[name])


def operand_heads(node: gs.Node) -> dict[str, tuple[int, int]]:
    """Return heads and width of a head for a FlashAttention node's query, key and value."""
    kv_heads = node.inputs[_OPERANDS["past_key"]].shape[1]
    key_width, value_width = (_head_width(node, name, kv_heads) for name in ("key", "value"))
    return {
        "query": (node.attrs["num_heads"], key_width),
        "key": (kv_heads, key_width),
        "value": (kv_heads, value_width),
    }


def _head_width(node: gs.Node, name: str, kv_heads: int) -> int:
    """Return the numbers of a key or value head, which an int4 cache packs."""
    past = node.inputs[_OPERANDS[f"past_{name}"]]
    if past.dtype != np.uint8:
        return int(past.shape[3])
    operand = get_operand(node, name)
    if operand is not None:
        return int(operand.shape[2]) // kv_heads
    return GROUP_WIDTH * int(node.inputs[_OPERANDS[f"past_{name}_scale"]].shape[3])


def may_pack(editor: Editor, node: gs.Node) -> bool:
    """Tell whether a FlashAttention node may read query, key and value as one tensor.

    The op learns from the cache how wide heads are; an int4 cache tells it in whole groups.
    """
    if editor.cache_dtype != "int4":
        return True
    sizes = operand_heads(node)
    return all(sizes[name][1] % GROUP_WIDTH == 0 for name in ("key", "value"))


def set_operand(node: gs.Node, name: str, tensor: gs.Tensor | None) -> None:
    """Set an input of a FlashAttention node by its name; None leaves it out."""
    index = _OPERANDS[name]
    while len(node.inputs) <= index:
        node.inputs.append(gs.Variable.empty())
    node.inputs[index] = gs.Variable.empty() if tensor is None else tensor
    while node.inputs[-1].is_empty():
        node.inputs.pop()


def upstream(outputs: Iterable[gs.Tensor], stop: Iterable[gs.Tensor] = ()) -> list[gs.Node]:
    """Return the nodes that compute `outputs`, each after the nodes it reads.

    Args:
        outputs: Tensors to compute.
        stop: Tensors taken as given; what lies above them is left out.
    """
    given = {tensor.name for tensor in stop}
    done: set[int] = set()
    order: list[gs.Node] = []
    for output in outputs:
        stack = [(node, False) for node in _producers([output], given)]
        while stack:
            node, inputs_done = stack.pop()
            if id(node) in done:
                continue
            if inputs_done:
                done.add(id(node))
                order.append(node)
            else:
                stack.append((node, True))
                stack += [(above, False) for above in reversed(_producers(node.inputs, given))]
    return order


def sort(graph: gs.Graph) -> None:
    """Drop nodes that no output needs and put the rest in topological order."""
    graph.cleanup()
    graph.nodes = upstream(graph.outputs)


def cast(editor: Editor, tensor: gs.Tensor, dtype: npt.DTypeLike) -> gs.Tensor:
    """Return a tensor in another type; the tensor itself if it has that type."""
    if tensor.dtype == np.dtype(dtype):
        return tensor
    attrs = {"to": np.dtype(dtype).type}
    return editor.add("Cast", [tensor], attrs, dtype=dtype, shape=tensor.shape)


def as_bias(editor: Editor, mask: gs.Tensor, dtype: npt.DTypeLike) -> gs.Tensor:
    """Turn a mask, bool (True = attend) or float, into numbers to add to the scores.

    The number for a masked slot is the type's lowest, not -inf: a row in which everything is
    masked then stays finite whatever computes its softmax.
    """
    if mask.dtype != np.dtype(bool):
        return cast(editor, mask, dtype)
    attend = editor.constant(np.zeros((), dtype))
    masked = editor.constant(np.array(np.finfo(dtype).min, dtype))
    return editor.add("Where", [mask, attend, masked], dtype=dtype, shape=mask.shape)


def constant_key(tensor: gs.Tensor) -> object:
    """Return a key that is equal for the same tensor and for small constants of equal content."""
    if (
        isinstance(tensor, gs.Constant)
        and not is_external(tensor)
        and tensor._values.nbytes <= _SHARED_CONSTANT_BYTES
        and tensor.name != names.NUM_LOGITS_TO_KEEP
    ):
        return (str(tensor.dtype), tuple(tensor.shape), tensor.values.tobytes())
    return tensor.name


def attributes_key(node: gs.Node) -> object:
    """Return a hashable form of a node's attributes."""
    return tuple(
        sorted(
            (name, constant_key(value) if isinstance(value, gs.Tensor) else repr(value))
            for name, value in node.attrs.items()
        )
    )


def _producers(tensors: Iterable[gs.Tensor], given: set[str]) -> list[gs.Node]:
    return [tensor.inputs[0] for tensor in tensors if tensor.inputs and tensor.name not in given]

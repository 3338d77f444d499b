"""The attention op alone, against ONNX Runtime's GroupQueryAttention and what the machine allows.

Both ops get the same tensors: rotary embedding inside the node, a shared cache of float32 that is
written in place, and for kvconv the all-ones mask that finished models carry. A decode is a chain
of nodes, each with a cache of its own, together larger than the processor's caches where the
context is long, so that keys and values come from memory as they do in a model. A prefill is one
node. All contenders and the roofs take turns; the best of their rounds counts. Where kvconv's cache
is quantised, kvconv over a float32 cache is one more contender.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from kvconv import memory, names
from kvconv.bench.point import Phase
from kvconv.bench.roofs import MemoryRoof, OnnxRuntimeMatMul, TorchMatMul
from kvconv.bench.session import open_session
from kvconv.cache_layout import ElementType, StoredTensor, stored_tensors
from kvconv.errors import KvconvError, MissingDependencyError
from kvconv.manifest import CacheLayer

if TYPE_CHECKING:
    import onnx

Variant = Literal["plain", "softcap", "head_sink"]
CacheType = Literal["float32", "int8", "int4"]
_Cache = dict[names.CacheTensorName, Any]
"""OrtValues of one node's cache."""

_DECODE_BYTES = 512 * 2**20
_MAX_NODES = 60
_SOFTCAP = 30.0
_TOLERANCES: dict[CacheType, float] = {"float32": 1e-4, "int8": 3e-2, "int4": 3e-1}
"""Root mean square of the difference between two outputs, relative to that of one."""
_SETTLE_S = 0.03
_ROUND_S = 0.1  # short runs are repeated for so long: the best of few depends on luck
"""Before each timing: the threads of the session before may still spin."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention: query heads, key/value heads, and the width of each."""

    num_heads: int
    kv_num_heads: int
    head_dim: int


SHAPES = (Heads(9, 3, 64), Heads(32, 8, 64), Heads(32, 8, 128))
"""SmolLM2-135M's heads, and those of most models of 1 to 8 billion parameters."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        what: `decode` (one new token behind context - 1) or `prefill` (context new tokens).
        context: Slots that the newest token attends to.
        heads: Sizes.
        variant: What the node has beside rotary embedding.
        batch: Rows.
        cache: dtype of kvconv's cache.
    """

    what: Phase
    context: int
    heads: Heads
    variant: Variant = "plain"
    batch: int = 1
    cache: CacheType = "float32"

    @property
    def new_tokens(self) -> int:
        """Tokens of a run, per row."""
        return 1 if self.what == "decode" else self.context

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values, with their scales, that a run attends to."""
        per_slot = sum(tensor.slot_bytes for tensor in self.cache_tensors)
        return self.batch * self.context * per_slot

    @property
    def cache_tensors(self) -> tuple[StoredTensor, ...]:
        """The tensors of a node's cache."""
        width = self.heads.head_dim
        return stored_tensors(CacheLayer(self.heads.kv_num_heads, width, width, self.cache))

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that measuring takes, but for what all cases share.

        GroupQueryAttention has flash kernels for the plain variant only; for the others it holds
        the scores of all heads at once.
        """
        per_token = 4 * self.heads.head_dim * (self.heads.num_heads + self.heads.kv_num_heads)
        activations = 3 * self.batch * self.new_tokens * per_token
        scores = 4 * self.batch * self.heads.num_heads * self.new_tokens * self.context
        held = scores if self.variant != "plain" else 0
        caches = replace(self, cache="float32").cache_bytes
        if self.cache != "float32":
            caches += self.cache_bytes
        return self.num_nodes * caches + activations + held

    @property
    def flops(self) -> int:
        """Operations of both products, masked pairs left out."""
        new, past = self.new_tokens, self.context - self.new_tokens
        pairs = new * past + new * (new + 1) // 2
        return 4 * self.batch * self.heads.num_heads * self.heads.head_dim * pairs

    @property
    def num_nodes(self) -> int:
        """Nodes of the chain, the same for every type of cache."""
        if self.what == "prefill":
            return 1
        cache_bytes = replace(self, cache="float32").cache_bytes
        return min(_MAX_NODES, math.ceil(_DECODE_BYTES / cache_bytes))


@dataclass(frozen=True, slots=True)
class AttentionPoint:
    """One case's result, per node.

    Attributes:
        case: What was measured.
        seconds: kvconv's best.
        gqa_seconds: GroupQueryAttention's best.
        float_seconds: kvconv's best over a float32 cache.
        rate: kvconv's bytes of the cache per second (decode) or operations per second (prefill).
        roofs: The same unit, by name: `read` and `copy`, or `sgemm onnxruntime` and `sgemm torch`
            (where PyTorch is installed).
    """

    case: Case
    seconds: float
    gqa_seconds: float
    float_seconds: float
    rate: float
    roofs: dict[str, float]

    @property
    def speedup(self) -> float:
        """How many times as fast as GroupQueryAttention."""
        return self.gqa_seconds / self.seconds

    @property
    def percent_of_roofs(self) -> dict[str, float]:
        """Percent of each roof that `rate` reaches."""
        return {name: 100 * self.rate / roof for name, roof in self.roofs.items()}


def cases(
    *,
    decode: Sequence[int] = (128, 2048, 6000),
    prefill: Sequence[int] = (128, 512, 2048, 6000),
    shapes: Sequence[Heads] = SHAPES,
    variants: Sequence[Variant] = ("plain", "softcap", "head_sink"),
    caches: Sequence[CacheType] = ("float32",),
) -> list[Case]:
    """Return every combination, at batch size 1."""
    phases: list[tuple[Phase, int]] = [("decode", n) for n in decode]
    phases += [("prefill", n) for n in prefill]
    return [
        Case(what, context, heads, variant, cache=cache)
        for heads, (what, context), variant, cache in itertools.product(
            shapes, phases, variants, caches
        )
    ]


def measure_attention(
    chosen: Sequence[Case], *, threads: int, repeats: int
) -> Iterator[AttentionPoint]:
    """Measure one case after the other; what can be refused is, before the first.

    Args:
        chosen: See `cases`.
        threads: Threads of every contender, >= 1.
        repeats: Rounds, >= 1, in each of which everything runs for a while.

    Returns:
        One point a case, as soon as it is done.

    Raises:
        MissingDependencyError: The onnx package is not installed.
        MemoryError: The machine has less memory than a case takes.
        LibraryError: The op library is absent.
        KvconvError: The two ops disagree by more than rounding.
    """
    try:
        import onnx  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError(package="onnx", extra="export") from error
    for case in chosen:
        _check_memory(case)
    return _measure_all(chosen, threads, repeats)


def _check_memory(case: Case) -> None:
    there_is = memory.physical_memory_bytes()
    if there_is is not None and case.num_bytes > there_is:
        raise MemoryError(
            f"the {case.what} of {case.context} tokens ({case.variant}, {case.heads.num_heads} "
            f"heads, {case.cache} cache) takes {case.num_bytes / 1e9:.1f} GB and this machine has "
            f"{there_is / 1e9:.1f} GB; smaller --depths take less"
        )


def _measure_all(chosen: Sequence[Case], threads: int, repeats: int) -> Iterator[AttentionPoint]:
    machine = MemoryRoof(threads)
    roofs: dict[Phase, dict[str, Callable[[], float]]] = {
        "decode": {"read": machine.read, "copy": machine.copy},
        "prefill": {"sgemm onnxruntime": OnnxRuntimeMatMul(threads).run},
    }
    try:
        roofs["prefill"]["sgemm torch"] = TorchMatMul(threads).run
    except ModuleNotFoundError:
        pass  # a roof less; nothing else needs PyTorch
    for case in chosen:
        yield _measure(case, roofs[case.what], threads, repeats)


def _measure(
    case: Case, roofs: dict[str, Callable[[], float]], threads: int, repeats: int
) -> AttentionPoint:
    tensors = _Tensors(case)
    floats = replace(case, cache="float32")
    contenders = [
        _Contender(case, tensors, names.OP_NAME, threads),
        _Contender(floats, tensors, names.GROUP_QUERY_ATTENTION, threads),
    ]
    if case.cache != "float32":
        contenders.append(_Contender(floats, tensors, names.OP_NAME, threads))
    outputs = [contender.run().copy() for contender in contenders]
    squares = [
        float(np.square(x, dtype=np.float64).mean()) for x in (outputs[0] - outputs[1], outputs[1])
    ]
    difference = math.sqrt(squares[0] / squares[1])
    if not difference <= _TOLERANCES[case.cache]:
        raise KvconvError(
            f"{names.OP_NAME} and {names.GROUP_QUERY_ATTENTION} differ by {difference:.2g} of "
            f"their size where {_TOLERANCES[case.cache]:.2g} is allowed ({case}). Check the "
            "versions of kvconv and onnxruntime."
        )
    seconds: list[list[float]] = [[] for _ in contenders]
    rates: dict[str, list[float]] = {name: [] for name in roofs}
    for _ in range(repeats):
        for contender, times in zip(contenders, seconds, strict=True):
            time.sleep(_SETTLE_S)
            times.append(_best_seconds(contender) / case.num_nodes)
        for name, roof in roofs.items():
            time.sleep(_SETTLE_S)
            rates[name].append(roof())
    best, gqa_best = (min(times) for times in seconds[:2])
    work = case.cache_bytes if case.what == "decode" else case.flops
    return AttentionPoint(
        case,
        best,
        gqa_best,
        min(seconds[-1]) if case.cache != "float32" else best,
        work / best,
        {name: max(values) for name, values in rates.items()},
    )


def _best_seconds(contender: "_Contender") -> float:
    contender.run()  # awake, and in the caches what stays there between runs
    best, end = math.inf, time.perf_counter() + _ROUND_S
    while True:
        started = time.perf_counter()
        contender.run()
        stopped = time.perf_counter()
        best = min(best, stopped - started)
        if stopped >= end:
            return best


class _Tensors:
    """What both ops read and write; caches are shared, for both write the same into them."""

    def __init__(self, case: Case) -> None:
        import onnxruntime

        rng = np.random.default_rng(0)
        heads, new = case.heads, case.new_tokens

        def normal(*shape: int) -> npt.NDArray[np.float32]:
            return rng.standard_normal(shape, np.float32)

        tokens = (case.batch, new)
        angles = np.outer(
            np.arange(case.context), 10000.0 ** -np.linspace(0, 1, heads.head_dim // 2)
        )
        cos, sin = (np.asarray(f(angles), np.float32) for f in (np.cos, np.sin))
        arrays: dict[str, npt.NDArray[Any]] = {
            "query": normal(*tokens, heads.num_heads * heads.head_dim),
            "key": normal(*tokens, heads.kv_num_heads * heads.head_dim),
            "value": normal(*tokens, heads.kv_num_heads * heads.head_dim),
            "attention_mask": np.ones((case.batch, case.context), np.int64),
            "cos": cos[None, -new:],
            "sin": sin[None, -new:],
            "cos_cache": cos,
            "sin_cache": sin,
            "seqlens_k": np.full(case.batch, case.context - 1, np.int32),
            "total_sequence_length": np.array(case.context, np.int32),
        }
        if case.variant == "head_sink":
            arrays["head_sink"] = normal(heads.num_heads)
        self._arrays = arrays  # OrtValues borrow their memory
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        self.values = {name: make(np.ascontiguousarray(a)) for name, a in arrays.items()}
        shape = (case.batch, heads.kv_num_heads, case.context, heads.head_dim)
        floats = [[normal(*shape), normal(*shape)] for _ in range(case.num_nodes)]
        self.caches: dict[CacheType, list[_Cache]] = {
            "float32": [{"key": make(key), "value": make(value)} for key, value in floats]
        }
        if case.cache != "float32":
            self.caches[case.cache] = _quantized(case, floats)


class _Contender:
    """A session of one op over the tensors, bound once."""

    def __init__(self, case: Case, tensors: _Tensors, op: str, threads: int) -> None:
        import onnxruntime

        graph = _graph(case, op, sorted(tensors.values))
        self._session = open_session(graph, threads=threads)
        self._tensors = tensors
        self._binding = self._session.io_binding()
        for graph_input in self._session.get_inputs():
            if graph_input.name in tensors.values:
                self._binding.bind_ortvalue_input(
                    graph_input.name, tensors.values[graph_input.name]
                )
        for i, cache in enumerate(tensors.caches[case.cache]):
            for name, value in cache.items():
                self._binding.bind_ortvalue_input(names.past(i, name), value)
            for name, value in cache.items():
                self._binding.bind_ortvalue_output(names.present(i, name), value)
        shape = (case.batch, case.new_tokens, case.heads.num_heads * case.heads.head_dim)
        self._output = np.empty(shape, np.float32)
        self._output_value = onnxruntime.OrtValue.ortvalue_from_numpy(self._output)
        self._binding.bind_ortvalue_output("output", self._output_value)

    def run(self) -> npt.NDArray[np.float32]:
        """Run every node once; return the last one's output, which the next run overwrites."""
        self._session.run_with_iobinding(self._binding)
        return self._output


def _quantized(case: Case, caches: Sequence[Sequence[npt.NDArray[np.float32]]]) -> list[_Cache]:
    """Let the op round and store keys and values [batch, kv_heads, context, head_dim]."""
    import onnxruntime

    make = onnxruntime.OrtValue
    size = case.heads.num_heads * case.heads.head_dim
    given: dict[str, npt.NDArray[Any]] = {
        "query": np.zeros((case.batch, case.context, size), np.float32),
        "attention_mask": np.ones((case.batch, case.context), np.int64),
    }
    chain = replace(case, what="prefill", variant="plain")
    graph = _graph(chain, names.OP_NAME, [*given, "key", "value"], window=1)
    session = open_session(graph, threads=1)
    quantized = []
    for rows in caches:
        for name, array in zip(("key", "value"), rows, strict=True):
            tokens = array.transpose(0, 2, 1, 3).reshape(case.batch, case.context, -1)
            given[name] = np.ascontiguousarray(tokens)
        binding = session.io_binding()
        for name, array in given.items():
            binding.bind_ortvalue_input(name, make.ortvalue_from_numpy(array))
        tensors: _Cache = {
            tensor.name: make.ortvalue_from_shape_and_type(
                (case.batch, tensor.num_heads, case.context, tensor.width),
                _onnx_type(tensor.element),
            )
            for tensor in case.cache_tensors
        }
        for name, value in tensors.items():
            binding.bind_ortvalue_input(names.past(0, name), value)
        for name, value in tensors.items():
            binding.bind_ortvalue_output(names.present(0, name), value)
        binding.bind_output("output")
        session.run_with_iobinding(binding)
        quantized.append(tensors)
    return quantized


def _onnx_type(element: ElementType) -> int:
    from onnx import TensorProto, helper

    if element == "bfloat16":  # numpy has none
        return int(TensorProto.BFLOAT16)
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(element)))


_GQA_INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length",
    "cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink",
)  # fmt: skip


def _graph(case: Case, op: str, available: Sequence[str], *, window: int = 0) -> "onnx.GraphProto":
    """Build the chain of nodes; the output of each is the query of the next."""
    from onnx import TensorProto, helper

    is_gqa = op == names.GROUP_QUERY_ATTENTION
    domain = names.ORT_DOMAIN if is_gqa else names.OP_DOMAIN
    attributes: dict[str, Any] = {
        "num_heads": case.heads.num_heads,
        "kv_num_heads": case.heads.kv_num_heads,
    }
    if is_gqa:
        attributes["do_rotary"] = 1
    if case.variant == "softcap":
        attributes["softcap"] = _SOFTCAP
    if window:
        attributes["window_size"] = window
    nodes: list[onnx.NodeProto] = []
    inputs: list[onnx.ValueInfoProto] = []
    outputs: list[onnx.ValueInfoProto] = []
    operands = _GQA_INPUTS if is_gqa else names.FLASH_ATTENTION_INPUTS
    used = [name for name in operands if name in available]
    types = {
        "attention_mask": TensorProto.INT64,
        "seqlens_k": TensorProto.INT32,
        "total_sequence_length": TensorProto.INT32,
    }
    ranks = {"cos_cache": 2, "sin_cache": 2, "attention_mask": 2, "total_sequence_length": 0}
    ranks |= {"seqlens_k": 1, "head_sink": 1}
    for name in used:
        shape = [None] * ranks.get(name, 3)
        kind = types.get(name, TensorProto.FLOAT)
        inputs.append(helper.make_tensor_value_info(name, kind, shape))
    for i in range(case.num_nodes):
        caches = {f"past_{t.name}": names.past(i, t.name) for t in case.cache_tensors}
        presents = [names.present(i, t.name) for t in case.cache_tensors]
        query = {} if i == 0 else {"query": f"output.{i - 1}"}
        output = "output" if i == case.num_nodes - 1 else f"output.{i}"
        given = {name: name for name in used} | caches | query
        nodes.append(
            helper.make_node(
                op, [given.get(name, "") for name in operands], [output, *presents],
                domain=domain, **attributes,
            )
        )  # fmt: skip
        for tensor in case.cache_tensors:
            sides = ((inputs, names.past), (outputs, names.present))
            for values, name_of in sides:
                name, element = name_of(i, tensor.name), _onnx_type(tensor.element)
                values.append(helper.make_tensor_value_info(name, element, [None] * 4))
    outputs.append(helper.make_tensor_value_info("output", TensorProto.FLOAT, [None] * 3))
    return helper.make_graph(nodes, "attention", inputs, outputs)

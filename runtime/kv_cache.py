"""KV caches: who owns the memory of keys and values, and how a run sees it.

`SharedBufferCache` (flash and gqa bundles) binds past and present to the same memory, so a run
copies nothing; `ConcatCache` (standard bundles) takes each run's longer presents as the next pasts.
Both live in host memory; those of `device_cache.py` do not. `kvconv.cache_layout` says which
tensors a layer has: keys and values, and scales where they are quantised. Layers that are rings
hold their newest tokens only, in shared buffers. Blocks can come behind the same interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import onnxruntime

from kvconv import names
from kvconv.cache_layout import ElementType, stored_tensors
from kvconv.errors import CacheFullError, RewindError
from kvconv.manifest import CacheLayer

# Type of the numpy array that owns the memory, ONNX TensorProto element type. numpy has no
# bfloat16; ONNX Runtime is told what the 16 bits mean.
ELEMENT_TYPES: dict[ElementType, tuple[npt.DTypeLike, int]] = {
    "float32": (np.float32, 1),
    "float16": (np.float16, 10),
    "bfloat16": (np.uint16, 16),
    "int8": (np.int8, 3),
    "uint8": (np.uint8, 2),
}
_ALIGNMENT_BYTES = 64


class CacheTensor(NamedTuple):
    """One tensor of a layer: memory owned by numpy, and ONNX Runtime's view of it.

    Attributes:
        array: [batch_size, num_key_value_heads, slots, width] (BNSH).
        value: The same memory with its ONNX type.
    """

    array: npt.NDArray[Any]
    value: onnxruntime.OrtValue


class BoundArrays:
    """The arrays that a binding has beside the cache: what keeps its shape is bound once.

    Args:
        binding: Bound to, as long as this lives.

    Attributes:
        changes: Grows with every call: while it stays, what was bound last is bound still.
    """

    def __init__(self, binding: onnxruntime.IOBinding) -> None:
        self.changes = 0
        self._binding = binding
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def bind_input(self, name: str, array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Let runs read a copy of an int64 array of any shape, and return that copy.

        It may be written to between runs, until an array of another shape is bound to the name.
        """
        self.changes += 1
        bound = self._arrays.get(name)
        if bound is not None and bound.shape == array.shape:
            bound[...] = array
            return bound
        bound = self._arrays[name] = array.copy()
        # `bind_cpu_input` does not find overridable initializers.
        value = onnxruntime.OrtValue.ortvalue_from_numpy(bound)
        self._binding.bind_ortvalue_input(name, value)
        return bound

    def bind_output(self, name: str, array: npt.NDArray[np.float32]) -> None:
        """Let runs write into a contiguous array."""
        self.changes += 1
        if self._arrays.get(name) is not array:
            self._arrays[name] = array
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            self._binding.bind_ortvalue_output(name, value)

    def bind_value(
        self, name: str, value: onnxruntime.OrtValue, *, is_output: bool = False
    ) -> None:
        """Let runs read, or write, a tensor wherever it lies."""
        self.changes += 1
        self._arrays.pop(name, None)
        bind = (
            self._binding.bind_ortvalue_output if is_output else self._binding.bind_ortvalue_input
        )
        bind(name, value)

    def release_output(self, name: str) -> None:
        """Let go of the array that runs wrote into, which would live as long as the cache."""
        self.changes += 1
        self._arrays.pop(name, None)
        self._binding.bind_output(name)


class KVCache(ABC):
    """The keys and values of a batch of sequences, for all layers.

    A run goes `prepare_run`, the run itself, `commit_run`; a run that fails is not committed and
    leaves the cache as it was. One thread at a time.

    Attributes:
        batch_size: Sequences held.
        capacity: Most tokens per sequence.
        arrays: What the binding of `prepare_run` has beside the cache.
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        batch_size: int,
        capacity: int,
        new_binding: Callable[[], onnxruntime.IOBinding],
    ) -> None:
        self.batch_size = batch_size
        self.capacity = capacity
        self._layers = tuple(layers)
        self._stored = [(i, t) for i, layer in enumerate(layers) for t in stored_tensors(layer)]
        self._new_binding = new_binding
        self._binding = new_binding()
        self.arrays = BoundArrays(self._binding)
        self._length = 0
        # Rings that can wrap: a cache of fewer tokens than that never loses one.
        self._rings = {
            (layer.slots(capacity), layer.slack)
            for layer in self._layers
            if layer.slack is not None and layer.slots(capacity) < capacity
        }
        self._allocate()

    @abstractmethod
    def _allocate(self) -> None:
        """Make the buffers of an empty cache."""

    @property
    def length(self) -> int:
        """Tokens per sequence in the cache now, padding included."""
        return self._length

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all buffers held now."""

    @property
    def most_new_tokens(self) -> int:
        """Most tokens of one run, so that rings keep what the first of them sees."""
        return min((slack + 1 for _, slack in self._rings), default=self.capacity)

    @property
    def shortest_rewind(self) -> int:
        """Least length, other than 0, that `rewind` takes; 0 where it takes all."""
        return 0

    def check_room(self, sequence_length: int) -> None:
        """Refuse tokens that would not fit; changes nothing.

        Raises:
            CacheFullError: length + sequence_length would pass the capacity.
        """
        needed = self._length + sequence_length
        if needed > self.capacity:
            raise CacheFullError(
                f"The run needs {needed} cache slots ({self._length} cached and {sequence_length} "
                f"new tokens), and the cache has {self.capacity}. Give it a larger "
                f"max_sequence_length (--max-sequence-length), or rewind or reset it.",
                needed=needed,
                capacity=self.capacity,
            )

    def check_run(self, sequence_length: int) -> None:
        """Refuse a run that would not fit, or that is too long for a ring; changes nothing.

        Raises:
            CacheFullError: As `check_room`, or sequence_length is more than `most_new_tokens`.
        """
        self.check_room(sequence_length)
        if sequence_length > self.most_new_tokens:
            raise CacheFullError(
                f"The run has {sequence_length} new tokens, and the ring caches of this bundle "
                f"take at most {self.most_new_tokens} at once. Run them in pieces, or export the "
                f"model with --no-ring.",
                needed=sequence_length,
                capacity=self.most_new_tokens,
            )

    @abstractmethod
    def prepare_run(self, sequence_length: int) -> onnxruntime.IOBinding:
        """Return the binding for a run of so many new tokens, pasts and presents bound.

        The caller binds the other inputs and outputs, and asks `check_run` first. The binding is
        valid until the next call of any method.
        """

    @abstractmethod
    def commit_run(self, sequence_length: int) -> None:
        """Count the new tokens as cached, after the prepared run succeeded."""

    @abstractmethod
    def rewind(self, length: int) -> None:
        """Forget all tokens from slot `length` on.

        Args:
            length: In [0, self.length]; ValueError otherwise.

        Raises:
            RewindError: It is less than `shortest_rewind`, and not 0; nothing has changed.
        """

    def reset(self) -> None:
        """Forget all tokens; a shared buffer keeps its memory."""
        self.rewind(0)

    @abstractmethod
    def fork(self) -> Self:
        """Return an independent copy with the same tokens and capacity."""

    def _new_tensors(self, slots: int) -> list[CacheTensor]:
        """Allocate all tensors of every layer, in layer order; the content is undefined."""
        return [
            _new_tensor(
                (self.batch_size, tensor.num_heads, layer.slots(slots), tensor.width),
                tensor.element,
            )
            for layer in self._layers
            for tensor in stored_tensors(layer)
        ]

    def _bind(
        self, pasts: Sequence[onnxruntime.OrtValue], presents: Sequence[onnxruntime.OrtValue]
    ) -> None:
        for (layer, tensor), past, present in zip(self._stored, pasts, presents, strict=True):
            self._binding.bind_ortvalue_input(names.past(layer, tensor.name), past)
            self._binding.bind_ortvalue_output(names.present(layer, tensor.name), present)

    def _check_rewind(self, length: int) -> None:
        if not 0 <= length <= self._length:
            raise ValueError(f"length is {length}; it must be in [0, {self._length}]")
        shortest = self.shortest_rewind
        if 0 < length < shortest:
            raise RewindError(
                f"The cache cannot forget {self._length - length} of its {self._length} tokens: "
                f"its rings have overwritten what came before, so that {self._length - shortest} "
                f"can be taken back, or all. Rewind to {shortest} or more, or reset it and run the "
                f"first {length} again; a bundle exported with --no-ring can rewind to any length.",
                length=length,
                shortest=shortest,
            )


class SharedBufferCache(KVCache):
    """Buffers allocated once, where past and present are the same memory.

    Those of rings hold their newest tokens, all others the full capacity.

    Args:
        layers: One per layer of the model.
        batch_size: Sequences.
        capacity: Tokens per sequence.
        new_binding: Makes a binding of the session.
        has_length: Whether the graph takes the past length as an input, as it does with rings.
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        batch_size: int,
        capacity: int,
        new_binding: Callable[[], onnxruntime.IOBinding],
        *,
        has_length: bool | None = None,
    ) -> None:
        has_rings = any(layer.cache_mode == "ring" for layer in layers)
        self._has_length = has_rings if has_length is None else has_length
        super().__init__(layers, batch_size, capacity, new_binding)

    def _allocate(self) -> None:
        self._most_written = 0  # since it was empty: what a rewind takes back was written too
        self._past_length = np.zeros(1, np.int32)
        self._allocate_buffers()

    def _allocate_buffers(self) -> None:
        """Make and bind the buffers, and the past length where the graph takes it."""
        # The memory is not touched: the system backs a slot only when a token is written to it.
        self._tensors = self._new_tensors(self.capacity)
        values = [tensor.value for tensor in self._tensors]
        self._bind(values, values)
        if self._has_length:
            value = onnxruntime.OrtValue.ortvalue_from_numpy(self._past_length)
            self._binding.bind_ortvalue_input(names.PAST_SEQUENCE_LENGTH, value)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return sum(tensor.array.nbytes for tensor in self._tensors)

    @property
    def shortest_rewind(self) -> int:
        """Least length, other than 0, of which a ring still holds the window."""
        written = self._most_written
        return max(
            (written - slack - 1 for slots, slack in self._rings if written > slots), default=0
        )

    def prepare_run(self, sequence_length: int) -> onnxruntime.IOBinding:
        """Return the one binding: the op finds the first free slot from the mask's width.

        Rings cannot tell it from that, and read the length.
        """
        self._past_length[0] = self._length
        # Now: a run that fails may have written all the same.
        self._most_written = max(self._most_written, self._length + sequence_length)
        return self._binding

    def commit_run(self, sequence_length: int) -> None:
        """Count the new tokens as cached."""
        self._length += sequence_length

    def rewind(self, length: int) -> None:
        """Forget all tokens from slot `length` on, by counting them as free."""
        self._check_rewind(length)
        self._length = length
        if length == 0:
            self._most_written = 0

    def fork(self) -> Self:
        """Return a copy; only slots in use are copied."""
        copy = type(self)(
            self._layers,
            self.batch_size,
            self.capacity,
            self._new_binding,
            has_length=self._has_length,
        )
        for source, target in zip(self._tensors, copy._tensors, strict=True):
            target.array[:, :, : self._length] = source.array[:, :, : self._length]
        copy._length, copy._most_written = self._length, self._most_written
        return copy


class ConcatCache(KVCache):
    """Tensors exactly as long as the tokens they hold, replaced by longer ones in every run."""

    def _allocate(self) -> None:
        self._pasts = self._new_tensors(0)
        self._presents: list[CacheTensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens cached now; a run needs the longer presents beside them."""
        return sum(tensor.array.nbytes for tensor in self._pasts)

    def prepare_run(self, sequence_length: int) -> onnxruntime.IOBinding:
        """Allocate presents that are longer by the new tokens, and bind them."""
        self._presents = self._new_tensors(self._length + sequence_length)
        self._bind(
            [tensor.value for tensor in self._pasts], [tensor.value for tensor in self._presents]
        )
        return self._binding

    def commit_run(self, sequence_length: int) -> None:
        """Make the presents the next run's pasts."""
        self._pasts, self._presents = self._presents, []
        self._length += sequence_length

    def rewind(self, length: int) -> None:
        """Forget all tokens from slot `length` on, by copying those that stay."""
        self._check_rewind(length)
        if length < self._length:
            self._pasts = self._copy_pasts(length)
            self._length = length

    def fork(self) -> Self:
        """Return a copy of all tokens."""
        copy = type(self)(self._layers, self.batch_size, self.capacity, self._new_binding)
        copy._pasts = self._copy_pasts(self._length)
        copy._length = self._length
        return copy

    def _copy_pasts(self, length: int) -> list[CacheTensor]:
        tensors = self._new_tensors(length)
        for source, target in zip(self._pasts, tensors, strict=True):
            target.array[...] = source.array[:, :, :length]
        return tensors


def _new_tensor(shape: tuple[int, ...], element: ElementType) -> CacheTensor:
    """Allocate without touching the memory, on a boundary that suits vector loads."""
    storage, element_type = ELEMENT_TYPES[element]
    num_bytes = int(np.prod(shape)) * np.dtype(storage).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    array = memory[start : start + num_bytes].view(storage).reshape(shape)
    value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, element_type)
    return CacheTensor(array, value)

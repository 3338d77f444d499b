"""A KV cache in the memory of a device, as sessions on CUDA use it.

The buffers are allocated once and never move, and so is the number of tokens that they hold, which
kernels read where it lies: a step can be captured as a CUDA graph and run again.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import onnxruntime

from kvconv import names
from kvconv.cache_layout import StoredTensor
from kvconv.errors import KvconvError
from kvconv.manifest import CacheLayer
from kvconv.runtime.kv_cache import ELEMENT_TYPES, SharedBufferCache
from kvconv.runtime.ort_options import ORT_ERRORS, reason

_INT32 = 6
"""Element of ONNX's TensorProto."""
_graph_ids = itertools.count(1)


class DeviceCache(SharedBufferCache):
    """Shared buffers on a device.

    Args:
        layers: One per layer of the model.
        batch_size: Sequences.
        capacity: Tokens per sequence.
        new_binding: Makes a binding of the session.
        device: ONNX Runtime's name of the device: `cuda`, or `cpu` for tests.

    Attributes:
        graph_id: Names the CUDA graph of this cache's steps. A graph reads and writes the addresses
            that it was captured with, so all steps of a cache have the same (`step_value`).

    Raises:
        KvconvError: The device has no room for it.
    """

    def __init__(
        self,
        layers: Sequence[CacheLayer],
        batch_size: int,
        capacity: int,
        new_binding: Callable[[], onnxruntime.IOBinding],
        *,
        device: str,
    ) -> None:
        self.device = device
        self.graph_id = next(_graph_ids)
        self._step_values: dict[str, onnxruntime.OrtValue] = {}
        super().__init__(layers, batch_size, capacity, new_binding, has_length=True)

    def _allocate_buffers(self) -> None:
        self._values = [
            self.new_value(
                (self.batch_size, tensor.num_heads, slots, tensor.width),
                ELEMENT_TYPES[tensor.element][1],
            )
            for slots, tensor in self._slots_and_tensors()
        ]
        self._bind(self._values, self._values)
        self._device_length = self.new_value((1,), _INT32)
        self._binding.bind_ortvalue_input(names.PAST_SEQUENCE_LENGTH, self._device_length)

    def _slots_and_tensors(self) -> Iterator[tuple[int, StoredTensor]]:
        for layer, tensor in self._stored:
            yield self._layers[layer].slots(self.capacity), tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, used or not."""
        return sum(
            self.batch_size * slots * tensor.slot_bytes
            for slots, tensor in self._slots_and_tensors()
        )

    def prepare_run(self, sequence_length: int) -> onnxruntime.IOBinding:
        """Return the one binding, the past length written to the device."""
        binding = super().prepare_run(sequence_length)
        self._device_length.update_inplace(self._past_length)
        return binding

    def fork(self) -> Self:
        """Return a copy, on the same device."""
        copy = type(self)(
            self._layers, self.batch_size, self.capacity, self._new_binding, device=self.device
        )
        for source, target in zip(self._values, copy._values, strict=True):
            target.update_inplace(source)
        copy._length, copy._most_written = self._length, self._most_written
        return copy

    def step_value(
        self, name: str, shape: tuple[int, ...], element_type: int
    ) -> onnxruntime.OrtValue:
        """Return the tensor that all steps of this cache bind to a name of the graph.

        Args:
            name: Of an input or output.
            shape: Its dimensions, the same at every call.
            element_type: Of ONNX's TensorProto.

        Raises:
            KvconvError: The device has no room for it.
        """
        if name not in self._step_values:
            self._step_values[name] = self.new_value(shape, element_type)
        return self._step_values[name]

    def new_value(self, shape: tuple[int, ...], element_type: int) -> onnxruntime.OrtValue:
        """Allocate a tensor on the device; its content is undefined.

        Args:
            shape: Its dimensions.
            element_type: Of ONNX's TensorProto.

        Raises:
            KvconvError: The device has no room for it.
        """
        try:
            return onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                shape, element_type, self.device
            )
        except ORT_ERRORS as error:
            raise KvconvError(
                f"{self.device} has no memory for a cache of {self.capacity} tokens for "
                f"{self.batch_size} sequences, {self.nbytes / 1e6:.0f} MB: {reason(error)} Use a "
                f"smaller --max-sequence-length, or --provider cpu."
            ) from error

"""The decode step on a device: everything that a step reads and writes stays where it is.

Token ids, positions and the length go to the device, the logits of the newest tokens come back,
and nothing else moves. Shapes and addresses never change, so ONNX Runtime may capture the step as a
CUDA graph and run that from then on.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from kvconv import names
from kvconv.runtime.decode_step import DecodeStep
from kvconv.runtime.device_cache import DeviceCache

_FLOAT32, _INT64 = 1, 7
"""Elements of ONNX's TensorProto."""


class DeviceStep(DecodeStep):
    """Runs one token per row on a device; see `DecodeStep`.

    The mask is as wide as the cache and written once: slots behind the length count as masked.

    Args:
        cache: Holds the tokens so far.
        attention_mask: As for `DecodeStep`.
        logits: As for `DecodeStep`.
        has_positions: As for `DecodeStep`.
        execute: Runs a binding as the CUDA graph of that id.

    Raises:
        KvconvError: The device has no room for mask and logits.
    """

    def __init__(
        self,
        cache: DeviceCache,
        attention_mask: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float32],
        *,
        has_positions: bool,
        execute: Callable[[onnxruntime.IOBinding, int], None],
    ) -> None:
        super().__init__(
            cache,
            attention_mask,
            logits,
            has_positions=has_positions,
            execute=self._execute_on_device,
        )
        self._graph_id = cache.graph_id
        self._execute_graph = execute
        given = {names.INPUT_IDS: self._ids}
        if has_positions:
            given[names.POSITION_IDS] = self._positions
        self._copies = []
        for name, numbers in given.items():
            value = cache.step_value(name, (cache.batch_size, 1), _INT64)
            cache.arrays.bind_value(name, value)
            self._copies.append((numbers, value))
        self._device_mask = cache.step_value(names.ATTENTION_MASK, attention_mask.shape, _INT64)
        self._device_mask.update_inplace(attention_mask)
        self._device_logits = cache.step_value(names.LOGITS, logits.shape, _FLOAT32)
        cache.arrays.bind_value(names.LOGITS, self._device_logits, is_output=True)
        self._changes = cache.arrays.changes

    def _next_masks(self) -> list[onnxruntime.OrtValue]:
        return [self._device_mask]

    def _execute_on_device(self, binding: onnxruntime.IOBinding) -> None:
        for numbers, value in self._copies:
            array: npt.NDArray[Any] = np.frombuffer(numbers, np.int64)
            value.update_inplace(array.reshape(value.shape()))
        self._execute_graph(binding, self._graph_id)
        self._logits[...] = self._device_logits.numpy()

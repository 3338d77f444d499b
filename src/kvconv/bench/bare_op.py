"""kvconv::FlashAttention on CUDA without ONNX Runtime: the installed op library, driven by ctypes.

The op sees a table of functions like ONNX Runtime's, and device memory that the caller owns: so the
op and its kernels can be measured where onnxruntime-gpu is not installed, and tested where there is
no GPU. Nothing but the standard library is needed.
"""

import ctypes
import itertools
import shutil
import tempfile
from collections.abc import Callable, Mapping
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

from kvconv import names
from kvconv.custom_ops import library_path
from kvconv.errors import KvconvError

_PROVIDER = b"CUDAExecutionProvider"
_API_SLOTS = 400
_KERNELS = names.FLASH_ATTENTION_INPUTS.index("kernels")
_UINT8 = 2


class DeviceTensor(NamedTuple):
    """A tensor in memory that the caller owns.

    Attributes:
        element_type: Of ONNX's TensorProto.
        shape: Its dimensions.
        address: Where it is, on the device.
    """

    element_type: int
    shape: tuple[int, ...]
    address: int


class _CustomOp(ctypes.Structure):
    """OrtCustomOp, as custom_ops/include/kvconv/ort_abi.h has it, up to what is called here."""

    _fields_ = (
        ("version", c_uint32),
        ("create_kernel", c_void_p),
        ("get_name", ctypes.CFUNCTYPE(c_char_p, c_void_p)),
        ("get_execution_provider_type", ctypes.CFUNCTYPE(c_char_p, c_void_p)),
        ("get_input_type", ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("get_input_type_count", ctypes.CFUNCTYPE(c_size_t, c_void_p)),
        ("get_output_type", ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t)),
        ("get_output_type_count", ctypes.CFUNCTYPE(c_size_t, c_void_p)),
        ("kernel_compute", c_void_p),
        ("kernel_destroy", ctypes.CFUNCTYPE(None, c_void_p)),
        ("get_input_characteristic", c_void_p),
        ("get_output_characteristic", c_void_p),
        ("get_input_memory_type", c_void_p),
        ("variadic", c_void_p * 4),
        (
            "create_kernel_v2",
            ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_void_p)),
        ),
        ("kernel_compute_v2", ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p)),
    )


class _ApiBase(ctypes.Structure):
    _fields_ = (
        ("get_api", ctypes.CFUNCTYPE(c_void_p, c_uint32)),
        ("get_version_string", ctypes.CFUNCTYPE(c_char_p)),
    )


class _Handles:
    """Numbers that stand for Python objects behind the C ABI."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._numbers = itertools.count(1)

    def add(self, value: object) -> int:
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def __getitem__(self, number: int) -> Any:
        return self._objects[number]

    def take(self, number: int) -> Any:
        return self._objects.pop(number)

    def clear(self) -> None:
        self._objects.clear()


class BareOp:
    """One FlashAttention node on CUDA.

    Args:
        activation: Element type of query, key, value and output.
        cache: Element type of the cache.
        attributes: Of the node: ints, floats and strings.
        kernels: The content of the file of kernels.
        allocate: Returns the address of so many bytes on the device, 256-byte aligned.
        free: Takes such an address back.
        stream: The stream that kernels are launched on; 0 is the default one.

    Raises:
        KvconvError: There is no driver, or the node or its kernels do not suit; says which.
    """

    def __init__(
        self,
        *,
        activation: int,
        cache: int,
        attributes: Mapping[str, int | float | str],
        kernels: bytes,
        allocate: Callable[[int], int],
        free: Callable[[int], None],
        stream: int = 0,
    ) -> None:
        self._handles = _Handles()
        self._attributes = attributes
        self._allocate, self._free, self._stream = allocate, free, stream
        self._inputs: dict[int, DeviceTensor] = {}
        self._outputs: dict[int, DeviceTensor] = {}
        self._kernels = ctypes.create_string_buffer(kernels, len(kernels))
        self._constant = DeviceTensor(_UINT8, (len(kernels),), ctypes.addressof(self._kernels))
        self._keep: list[Any] = []
        self._ops: list[int] = []
        self._api = self._make_api()
        self._library = self._load()
        self._op = self._find(activation, cache)
        self._node = c_void_p()
        self._raise(self._op.create_kernel_v2(byref(self._op), self._api, None, byref(self._node)))

    def run(self, inputs: Mapping[str, DeviceTensor], outputs: Mapping[str, DeviceTensor]) -> None:
        """Launch one run; it may not have ended when this returns.

        Args:
            inputs: By the names of `kvconv.names.FLASH_ATTENTION_INPUTS`.
            outputs: By those of `FLASH_ATTENTION_OUTPUTS`; pasts may be presents.

        Raises:
            KvconvError: The op refused the run; nothing was launched.
        """
        self._inputs = {
            names.FLASH_ATTENTION_INPUTS.index(name): tensor for name, tensor in inputs.items()
        }
        self._outputs = {
            names.FLASH_ATTENTION_OUTPUTS.index(name): tensor for name, tensor in outputs.items()
        }
        try:
            self._raise(self._op.kernel_compute_v2(self._node, None))
        finally:
            self._handles.clear()  # the op keeps no tensor of a run

    def close(self) -> None:
        """End the node; its kernels are unloaded."""
        if self._node:
            self._op.kernel_destroy(self._node)
            self._node = c_void_p()

    def _load(self) -> ctypes.CDLL:
        # A copy of its own: the library keeps what the first program registers it with.
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / names.LIBRARY_FILE
            shutil.copyfile(library_path(), copy)
            library = ctypes.CDLL(str(copy))
        base = _ApiBase(
            self._kept(_ApiBase._fields_[0][1], lambda _: self._api),
            self._kept(_ApiBase._fields_[1][1], lambda: b"1.18.0"),
        )
        library.RegisterCustomOps.restype = c_void_p
        self._raise(library.RegisterCustomOps(None, byref(base)))
        return library

    def _find(self, activation: int, cache: int) -> _CustomOp:
        past_key = names.FLASH_ATTENTION_INPUTS.index("past_key")
        for address in self._ops:
            op = _CustomOp.from_address(address)
            if (
                op.get_name(address) == names.OP_NAME.encode()
                and op.get_execution_provider_type(address) == _PROVIDER
                and op.get_input_type(address, 0) == activation
                and op.get_input_type(address, past_key) == cache
            ):
                return op
        raise KvconvError(
            f"kvconv::{names.OP_NAME} on CUDA takes no activations of ONNX type {activation} over "
            f"a cache of type {cache}."
        )

    def _raise(self, status: int | None) -> None:
        if status:
            raise KvconvError(self._handles.take(status))

    def _kept(self, prototype: Any, function: Callable[..., Any]) -> Any:
        callback = prototype(function)
        self._keep.append(callback)
        return callback

    def _make_api(self) -> int:
        """Fill the slots that the op library calls, as ort_abi.h numbers them."""
        table = (c_void_p * _API_SLOTS)()
        handle, out = c_void_p, POINTER(c_void_p)

        def slot(number: int, result: Any, *arguments: Any) -> Callable[[Any], None]:
            def fill(function: Callable[..., Any]) -> None:
                callback = self._kept(ctypes.CFUNCTYPE(result, *arguments), function)
                table[number] = ctypes.cast(callback, c_void_p).value

            return fill

        def status(message: str) -> int:
            return self._handles.add(message)

        def give(place: Any, value: int) -> None:
            place[0] = value

        def attribute(name: bytes, kind: type, place: Any) -> int | None:
            value = self._attributes.get(name.decode())
            if type(value) is not kind:
                return status("no such attribute")
            place[0] = value
            return None

        def text_attribute(_: Any, name: bytes, text: int, size: Any) -> int | None:
            value = self._attributes.get(name.decode())
            if not isinstance(value, str):
                return status("no such attribute")
            raw = value.encode() + b"\0"
            if text:
                ctypes.memmove(text, raw, len(raw))
            size[0] = len(raw)
            return None

        def get_output(_: Any, index: int, dims: Any, rank: int, place: Any) -> int | None:
            tensor = self._outputs.get(index)
            shape = tuple(dims[axis] for axis in range(rank))
            if tensor is None or tensor.shape != shape:
                given = None if tensor is None else tensor.shape
                return status(f"output {index} is {given}; it must be {shape}")
            give(place, self._handles.add(tensor))
            return None

        def get_dims(info: int, dims: Any, rank: int) -> None:
            for axis in range(rank):
                dims[axis] = self._handles[info].shape[axis]

        def get_input(_: Any, index: int, place: Any) -> None:
            tensor = self._inputs.get(index)
            give(place, 0 if tensor is None else self._handles.add(tensor))

        def get_constant(_: Any, index: int, is_constant: Any, place: Any) -> None:
            is_constant[0] = index == _KERNELS
            if index == _KERNELS:
                give(place, self._handles.add(self._constant))

        slot(0, handle, c_int, c_char_p)(lambda _, message: status(message.decode()))
        slot(26, handle, c_char_p, out)(lambda _, place: give(place, 1))
        slot(27, handle, handle, handle)(lambda _, op: self._ops.append(op))
        slot(28, handle, handle, handle)(lambda *_: None)
        slot(51, handle, handle, out)(lambda v, place: give(place, self._handles[v].address))
        slot(60, handle, handle, POINTER(c_int))(
            lambda info, place: give(place, self._handles[info].element_type)
        )
        slot(61, handle, handle, POINTER(c_size_t))(
            lambda info, place: give(place, len(self._handles[info].shape))
        )
        slot(62, handle, handle, POINTER(c_int64), c_size_t)(get_dims)
        slot(65, handle, handle, out)(lambda value, place: give(place, value))
        slot(72, handle, handle, POINTER(c_int))(lambda _, place: give(place, 0))
        slot(75, handle, handle, c_size_t, out)(
            lambda _, size, place: give(place, self._allocate(size))
        )
        slot(76, handle, handle, handle)(lambda _, address: self._free(address))
        slot(77, handle, handle, out)(lambda _, place: give(place, 1))
        slot(85, handle, handle, c_char_p, POINTER(c_float))(
            lambda _, name, place: attribute(name, float, place)
        )
        slot(86, handle, handle, c_char_p, POINTER(c_int64))(
            lambda _, name, place: attribute(name, int, place)
        )
        slot(87, handle, handle, c_char_p, c_void_p, POINTER(c_size_t))(text_attribute)
        slot(90, handle, handle, c_size_t, out)(get_input)
        slot(91, handle, handle, c_size_t, POINTER(c_int64), c_size_t, out)(get_output)
        slot(93, None, handle)(lambda number: self._handles.take(number) and None)
        slot(99, None, handle)(lambda _: None)
        slot(132, None, handle)(lambda _: None)
        slot(193, handle, handle, out)(lambda _, place: give(place, self._stream))
        slot(249, handle, handle, c_size_t, POINTER(c_int), out)(get_constant)
        slot(278, handle, handle, c_int, out)(lambda _, __, place: give(place, 1))
        self._keep.append(table)
        return ctypes.addressof(table)

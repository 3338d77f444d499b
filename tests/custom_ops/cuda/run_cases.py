"""Runs the CUDA op over the shim of the driver and compares its results with the oracle's.

    run_cases.py PATH_OF_THE_SHIM numpy        kernels of contract.py, images that do nothing
    run_cases.py PATH_OF_THE_SHIM interpreter  the Triton kernels; wants TRITON_INTERPRET=1
    run_cases.py PATH_OF_THE_SHIM compiled     kernels of contract.py, images compiled for sm_80

A program of its own, because the shim makes the whole process believe that there is a driver.
"""

import ctypes
import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import contract
import numpy as np
import numpy.typing as npt

import flash_case
import kernel_packs
import single_node
from flash_case import Case
from kernel_packs import TestKernel, write_pack
from kvconv.bench.bare_op import BareOp, DeviceTensor
from tolerances import assert_close

BASE = Case(width=16, mode="past_sequence_length", padding="left", batch=2, poison=True)
CASES = {
    "prefill": BASE,
    "decode": dataclasses.replace(BASE, new=1, past=30, spare=600),
    "no past": dataclasses.replace(BASE, past=0, new=7),
    "no mask": dataclasses.replace(BASE, padding="", poison=False),
    "holes": dataclasses.replace(BASE, padding="holes", new=1, past=20),
    "nothing attended": dataclasses.replace(BASE, padding="none attended", new=1, past=9),
    "multi-head": dataclasses.replace(BASE, heads=3, kv_heads=3),
    "one key head": dataclasses.replace(BASE, heads=4, kv_heads=1, new=1, past=17),
    "widths differ": dataclasses.replace(BASE, value_width=32, new=1),
    "packed": dataclasses.replace(BASE, packed=True, rotary="half"),
    "packed decode": dataclasses.replace(BASE, packed=True, rotary="half", new=1, past=12),
    "interleaved": dataclasses.replace(BASE, rotary="interleaved", rotary_dim=8, rotary_batch=2),
    "window": dataclasses.replace(BASE, window=4, past=11),
    "window decode": dataclasses.replace(BASE, window=4, past=11, new=1),
    "softcap and scale": dataclasses.replace(BASE, softcap=1.5, scale=0.7),
    "sinks": dataclasses.replace(BASE, sink=True),
    "sinks decode": dataclasses.replace(BASE, sink=True, new=1, past=40, spare=300),
    "alibi": dataclasses.replace(BASE, alibi=True, new=1, past=8),
    "bias": dataclasses.replace(BASE, bias=(1, 4, 5, 8)),
    "bias of rows": dataclasses.replace(BASE, bias=(2, 1, 1, 8), new=1, past=7),
    "not causal": dataclasses.replace(BASE, causal=False),
    "window of one": dataclasses.replace(BASE, window=1, past=3),
    "many splits": dataclasses.replace(BASE, new=1, past=2000, spare=1100, batch=1),
    "float16 over float32": dataclasses.replace(BASE, activation="float16"),
    "float16": dataclasses.replace(BASE, activation="float16", cache="float16", new=1),
    "float32 over float16": dataclasses.replace(BASE, cache="float16"),
}


CASES_OF_MODES = {
    "numpy": tuple(CASES),
    "interpreter": ("decode", "no past", "packed", "sinks decode", "window", "float16"),
    "compiled": ("packed decode", "float16"),  # some seconds a kernel
}


class Memory:
    """The device's memory: arrays of the process, found again by their addresses."""

    def __init__(self) -> None:
        self._arrays: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, num_bytes: int) -> int:
        array = np.empty(num_bytes + 256, np.uint8)
        array = array[-array.ctypes.data % 256 :][:num_bytes]
        array[...] = 0xFF  # NaN
        self._arrays[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address: int) -> None:
        del self._arrays[address]

    def put(self, array: npt.NDArray, element_type: int) -> DeviceTensor:
        address = self.allocate(max(array.nbytes, 1))
        self._arrays[address][: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
        return DeviceTensor(element_type, array.shape, address)

    def at(self, address: int, dtype: npt.DTypeLike) -> npt.NDArray:
        for start, array in self._arrays.items():
            if start <= address < start + len(array):
                rest = array[address - start :]
                size = np.dtype(dtype).itemsize
                return rest[: len(rest) // size * size].view(dtype)
        raise AssertionError(f"no memory at {address}")


class Launch(ctypes.Structure):
    """KvconvShimLaunch."""

    _fields_ = (
        ("function", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_ubyte)),
        ("argument_bytes", ctypes.c_size_t),
        ("offsets", ctypes.POINTER(ctypes.c_uint)),
        ("sizes", ctypes.POINTER(ctypes.c_uint)),
        ("num_arguments", ctypes.c_size_t),
    )


ON_LAUNCH = ctypes.CFUNCTYPE(None, ctypes.POINTER(Launch), ctypes.c_void_p)


def pointer_dtype(name: str, case: Case) -> str:
    if name in ("query", "key", "value", "output", "attention_bias"):
        return case.activation
    if name in ("present_key", "present_value"):
        return case.cache
    return {"attention_mask": "int64", "past_sequence_length": "int32"}.get(name, "float32")


def read_arguments(
    launch: Launch, taken: tuple[str, ...], case: Case, memory: Memory
) -> dict[str, object]:
    values: dict[str, object] = {}
    raw = bytes(launch.arguments[: launch.argument_bytes])
    assert launch.num_arguments == len(taken) + 2  # Triton's own
    for i, name in enumerate(taken):
        number = kernel_packs.ARGUMENTS[name]
        part = raw[launch.offsets[i] : launch.offsets[i] + launch.sizes[i]]
        if number >= 64:
            values[name] = float(np.frombuffer(part, np.float32)[0])
        else:
            values[name] = int.from_bytes(part, "little")
        if number < 32 and values[name]:
            values[name] = memory.at(values[name], pointer_dtype(name, case))
    return values


def features_of(case: Case) -> frozenset[str]:
    wanted = {
        "rotary": case.rotary, "rotary_interleaved": case.rotary == "interleaved",
        "mask": case.padding, "bias": case.bias, "alibi": case.alibi, "sink": case.sink,
        "softcap": case.softcap, "window": case.window, "causal": case.causal,
    }  # fmt: skip
    return frozenset(name for name, is_there in wanted.items() if is_there)


def interpret(
    kind: str, grid: tuple[int, int, int], arguments: contract.Arguments, v: contract.Variant
) -> None:
    """Run a Triton kernel on the arguments of a launch; pointers are torch tensors."""
    import torch

    from kvconv.custom_ops.triton import append, combine, decode, prefill

    module = {"append": append, "prefill": prefill, "decode": decode, "combine": combine}[kind]
    kernel = getattr(module, f"{kind}_kernel")
    values = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value or None
        for name, value in arguments.items()
    }
    values |= {name: arguments[name] for name in arguments if name.endswith("stride")}
    values |= {name: arguments[name] for name in arguments if name.startswith("bias_stride")}
    values |= {
        "HEAD_DIM": v.head_dim,
        "VALUE_HEAD_DIM": v.value_head_dim,
        "GROUP": v.group,
        "ROTARY_DIM": v.rotary_dim,
        "FEATURES": sum(kernel_packs.FEATURES[feature] for feature in v.features),
        "CACHE_BITS": 0,
        "TILE_M": TestKernel.tile_m,
        "TILE_N": TestKernel.tile_n,
    }
    kernel[grid](**{name: values.get(name) for name in kernel.arg_names})


def compiled_pack(
    types: tuple[int, int], widths: tuple[int, int, int, int], features: frozenset[str]
) -> tuple[bytes, dict[str, tuple[str, tuple[str, ...]]]]:
    """Compile a node's kernels; returns the pack, and kind and arguments by function."""
    from kvconv.custom_ops.triton.pack import read_pack, write_pack
    from kvconv.custom_ops.triton.variants import Attention, Feature, list_variants
    from kvconv.custom_ops.triton.worker import compile_variants

    bits = Feature(sum(kernel_packs.FEATURES[feature] for feature in features))
    variants = list_variants([Attention(*types, *widths, bits)], ["sm_80"])
    pack = write_pack(compile_variants(variants, processes=1))
    facts = {
        entry.function: (entry.kind.name.lower(), entry.arguments) for entry in read_pack(pack)
    }
    return pack, facts


def run(case: Case, shim: ctypes.CDLL, mode: str) -> list[str]:
    """Compare a case with the oracle; returns the kernels launched."""
    value_width = case.value_width or case.width
    rotary_dim = (case.rotary_dim or case.width) if case.rotary else 0
    widths = (case.width, value_width, case.heads // case.kv_heads, rotary_dim)
    types = (single_node.ONNX_TYPES[case.activation], single_node.ONNX_TYPES[case.cache])
    features = features_of(case)
    if mode == "compiled":
        pack, facts = compiled_pack(types, widths, features)
    else:
        kernels = [TestKernel(kind, *types, *widths, features) for kind in contract.KERNELS]
        pack, facts = write_pack(kernels), {k.kind: (k.kind, k.arguments) for k in kernels}
    variant = contract.Variant(*widths, features)
    memory = Memory()
    launched: list[str] = []
    failures: list[Exception] = []

    def on_launch(pointer: object, _: object) -> None:
        launch = pointer.contents  # type: ignore[attr-defined]
        kind, taken = facts[launch.function.decode()]
        launched.append(kind)
        try:
            grid = tuple(launch.grid)
            arguments = read_arguments(launch, taken, case, memory)
            if mode == "interpreter":
                interpret(kind, grid, arguments, variant)
            else:
                contract.KERNELS[kind](grid, arguments, variant)
        except Exception as error:  # ctypes would only print it
            failures.append(error)

    callback = ON_LAUNCH(on_launch)
    shim.kvconv_shim_on_launch(callback, None)
    op = BareOp(
        activation=types[0],
        cache=types[1],
        attributes=case.node_attributes,
        kernels=pack,
        allocate=memory.allocate,
        free=memory.free,
    )
    inputs = flash_case.make_inputs(case)
    caches = flash_case.expected_caches(case, inputs)
    expected = flash_case.expected_output(case, inputs, caches)
    given = dict(inputs)
    if case.bias is not None and given["attention_bias"].shape[-1] > 1:
        spare = [(0, 0)] * 3 + [(0, case.capacity - case.total)]  # as wide as the mask
        given["attention_bias"] = np.pad(given["attention_bias"], spare)
    given = flash_case.pack(given) if case.packed else given
    placed = {
        name: memory.put(
            array,
            single_node.ONNX_TYPES[single_node.input_type(name, case.activation, case.cache)],
        )
        for name, array in given.items()
    }
    output = memory.put(
        np.zeros((case.batch, case.new, case.heads * value_width), case.activation), types[0]
    )
    op.run(
        placed,
        {
            "output": output,
            "present_key": placed["past_key"],
            "present_value": placed["past_value"],
        },
    )
    op.close()
    for failure in failures:
        raise failure
    found = memory.at(output.address, case.activation).reshape(output.shape)
    tolerance = "float16" if "float16" in (case.activation, case.cache) else "float32"
    assert_close(found, expected.reshape(found.shape), tolerance, "output")
    for name, cache in zip(("past_key", "past_value"), caches, strict=True):
        kept = memory.at(placed[name].address, case.cache).reshape(cache.shape)
        used = slice(None), slice(None), slice(case.total)
        assert_close(kept[used], cache[used], tolerance, name)
    return launched


def main() -> None:
    shim = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    shim.kvconv_shim_complaints.restype = ctypes.c_char_p
    mode = sys.argv[2]
    for name in CASES_OF_MODES[mode]:
        case = CASES[name]
        launched = run(case, shim, mode)
        wanted = ["append", "decode", "combine"] if case.new == 1 else ["append", "prefill"]
        assert launched == wanted, f"{name}: {launched}"
        complaints = shim.kvconv_shim_complaints().decode()
        assert not complaints, complaints
        sys.stdout.write(f"{name}: {', '.join(launched)}\n")


if __name__ == "__main__":
    main()

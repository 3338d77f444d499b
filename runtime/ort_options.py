"""How ONNX Runtime is set up for a bundle: options, op library, providers, and its errors."""

import os
from typing import Any

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state

from kvconv import custom_ops, names
from kvconv.errors import LibraryError, ProviderError
from kvconv.flavour import FLAVOURS
from kvconv.manifest import Provider
from kvconv.runtime import cuda
from kvconv.runtime.bundle import Bundle

_PROVIDERS: dict[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_FATAL_ONLY = 4

# ONNX Runtime's exceptions share no base of their own; runs with I/O binding raise RuntimeError.
ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(
        value
        for value in vars(onnxruntime_pybind11_state).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ),
)


def reason(error: Exception) -> str:
    """Return what ONNX Runtime says, ready to be followed by another sentence."""
    return str(error).rstrip(". \n") + "."


def session_options(threads: int | None, *, spin: bool = True) -> onnxruntime.SessionOptions:
    """Return options for growing caches and a quiet terminal.

    Threads spin while they wait, as is ONNX Runtime's default. Handing work to one that spins
    takes 0.3 to 1.4 us, to one that sleeps 3.2 us, and a step of a small quantised model does so
    some 150 times. It pays only while cores are free: on 2 cores that other programs kept busy, an
    int4 step of SmolLM2 at depth 128 took 17 ms with spinning and 9 ms without. Weights in
    external files are mapped, not read. Packing them is what a float32 bundle needs most of its
    start for (0.5 of 0.75 s), and it makes prefill 20% faster; quantised weights of the flash
    flavour are never packed.

    Args:
        threads: Threads of the pool, >= 1; None for one per core this process may use.
        spin: Whether threads spin while they wait.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _default_threads() if threads is None else threads
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Every decode step has new shapes, so a plan of the memory would never be used again.
    options.enable_mem_pattern = False
    # All errors arrive as exceptions; the terminal belongs to the text.
    options.log_severity_level = _FATAL_ONLY
    return options


def _default_threads() -> int:
    """Return 0 (one thread per physical core) unless this process may use only some cores."""
    if not hasattr(os, "sched_getaffinity"):
        return 0
    usable = len(os.sched_getaffinity(0))
    return usable if usable < (os.cpu_count() or usable) else 0


def register_library(
    options: onnxruntime.SessionOptions, bundle: Bundle, use_bundle_library: bool
) -> None:
    """Give the session the op library, if the bundle's graph needs it.

    Raises:
        LibraryError: The library is absent, too old, or refused by ONNX Runtime.
    """
    op_version = bundle.manifest.op_version
    if op_version is None:
        if use_bundle_library:
            raise LibraryError(
                f"The bundle {bundle.path} needs no op library. Leave out --use-bundle-library."
            )
        return
    if not use_bundle_library:
        if op_version > names.OP_VERSION:
            raise LibraryError(
                f"The bundle {bundle.path} needs version {op_version} of the {names.OP_DOMAIN} "
                f"operators; the installed library has {names.OP_VERSION}. Upgrade kvconv, or, if "
                f"you trust who made the bundle, use its own library with --use-bundle-library."
            )
        if op_version < names.FLOAT_CACHES_OP_VERSION and bundle.manifest.quantization is not None:
            raise LibraryError(
                f"The bundle {bundle.path} has quantised weights as version {op_version} of the "
                f"{names.OP_DOMAIN} operators read them; the installed library has "
                f"{names.OP_VERSION}, which reads them in another order. Export the model again."
            )
        custom_ops.register(options)
        return
    if names.LIBRARY_FILE not in bundle:
        raise LibraryError(
            f"The bundle {bundle.path} carries no {names.LIBRARY_FILE}. Leave out "
            f"--use-bundle-library to use the installed one."
        )
    try:
        options.register_custom_ops_library(str(bundle.file(names.LIBRARY_FILE)))
    except ORT_ERRORS as error:
        raise LibraryError(
            f"ONNX Runtime {onnxruntime.__version__} refuses {bundle.path / names.LIBRARY_FILE}: "
            f"{reason(error)} Leave out --use-bundle-library to use the installed one."
        ) from error


def execution_providers(
    bundle: Bundle, provider: Provider, *, cuda_graph: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Return the provider asked for and those it needs: ONNX Runtime's names, and options.

    Args:
        bundle: What will run.
        provider: `cpu` or `cuda`.
        cuda_graph: Whether runs may be captured as CUDA graphs.

    Raises:
        ProviderError: It is not available, or has no kernel for the bundle's attention.
    """
    available = onnxruntime.get_available_providers()
    if provider == "cuda" and (why := cuda.why_unavailable()) is not None:
        raise ProviderError(
            f"CUDA cannot be used: {why}.",
            provider=provider,
            available=[name for name, full in _PROVIDERS.items() if full in available],
        )
    if provider not in _PROVIDERS or _PROVIDERS[provider] not in available:
        usable = [name for name, full in _PROVIDERS.items() if full in available]
        raise ProviderError(
            f"The provider {provider!r} is not available; this onnxruntime has "
            f"{', '.join(usable)}. Use one of them, or see `kvconv doctor`.",
            provider=provider,
            available=usable,
        )
    if provider == "cpu":
        return [(_PROVIDERS["cpu"], {})]
    if FLAVOURS[bundle.manifest.attention].shared_buffer and bundle.manifest.kernels is None:
        # Buffers lie in host memory: ONNX Runtime would copy every cache to and fro, in silence.
        raise ProviderError(
            f"{bundle.path} was exported for the CPU and has no CUDA kernels. Use --provider cpu, "
            f"or export the model again with --provider cuda.",
            provider=provider,
            available=["cpu"],
        )
    # The CPU provider carries the few operators on shapes.
    options = {"enable_cuda_graph": "1"} if cuda_graph else {}
    return [(_PROVIDERS[provider], options), (_PROVIDERS["cpu"], {})]

"""CUDA: whether it can be used here, and if not, why.

Nothing but `ctypes` looks at the driver; ONNX Runtime does all the rest.
"""

import ctypes
import importlib.metadata
import sys

import onnxruntime

_PROVIDER = "CUDAExecutionProvider"
DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_INSTALL = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'kvconv[cuda]'"


def why_unavailable() -> str | None:
    """Return a sentence saying why CUDA cannot be used, and what to do; None where it can.

    Loads the driver's library, and asks it nothing.
    """
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError:
        return (
            f"no NVIDIA driver was found ({DRIVER_LIBRARY}); install one on a machine with an "
            f"NVIDIA GPU, or use --provider cpu"
        )
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) == 2:
        return (
            f"onnxruntime and onnxruntime-gpu are both installed and overwrite each other; "
            f"install one alone: {_INSTALL}"
        )
    if _PROVIDER not in onnxruntime.get_available_providers():
        return (
            f"{' '.join(installed) or 'this onnxruntime'} {onnxruntime.__version__} is built for "
            f"the CPU; install the one for CUDA in its place: {_INSTALL}"
        )
    return None


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

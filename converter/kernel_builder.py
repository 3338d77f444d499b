"""Compiles the CUDA kernels that a model needs."""

from pathlib import Path

from kvconv.errors import ExportError
from kvconv.manifest import Kernels


class TritonKernels:
    """Compiles kvconv's Triton kernels; needs no GPU.

    Args:
        gpus: What to compile for, such as `sm_90`; empty for all that are tried.
    """

    def __init__(self, gpus: tuple[str, ...] = ()) -> None:
        self.gpus = gpus

    def build(self, model_path: Path) -> tuple[bytes, Kernels]:
        """Return the content of the file of kernels, and what the manifest says of it.

        Args:
            model_path: The rewritten model.

        Raises:
            ExportError: There is no compiler for them.
        """
        raise ExportError(
            f"This kvconv cannot compile the CUDA kernels of {model_path.name}. Export for the "
            f"CPU, without --provider cuda."
        )

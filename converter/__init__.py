"""The converter: turns a Hugging Face decoder into a bundle.

`export` is the whole public interface; the other modules are its stages. Importing this package
imports neither PyTorch nor ONNX.
"""

import os

from kvconv.converter.options import (
    ExportOptions,
    ExportReport,
    KernelBuilder,
    Progress,
    Verifier,
)
from kvconv.converter.pipeline import export

__all__ = ["ExportOptions", "ExportReport", "KernelBuilder", "Progress", "Verifier", "export"]

# PyTorch's OpenMP threads spin while they wait, which on cores shared with anything else makes a
# decoder ten times slower. OpenMP reads this when PyTorch is imported, which comes later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

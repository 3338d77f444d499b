"""The converter: turns a Hugging Face decoder into a bundle.

`export` is the whole public interface; the other modules are its stages. Importing this package
imports neither PyTorch nor ONNX.
"""

from kvconv.converter.options import ExportOptions, ExportReport, Progress, Verifier
from kvconv.converter.pipeline import export

__all__ = ["ExportOptions", "ExportReport", "Progress", "Verifier", "export"]

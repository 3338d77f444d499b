"""Convert Hugging Face decoders to ONNX with an in-place KV cache, and run them.

This package imports nothing heavy; use `kvconv.converter` (torch, transformers) to convert and
`kvconv.runtime` (numpy, onnxruntime) to generate.
"""

__version__ = "0.1.0"

"""The CUDA kernels of kvconv::FlashAttention in Triton, and how they become a file of kernels.

Nothing here needs a GPU. Only `compile` and the kernels import triton; the rest is standard
library.
"""

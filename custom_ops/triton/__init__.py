"""Triton kernels of `kvconv::FlashAttention` on CUDA, compiled ahead of time.

One file a kernel: `append` writes new keys and values into the cache, `prefill` attends from
several new tokens, `decode` from one, in splits of the cache that `combine` adds up; `scores` and
`rows` have what they share. Nothing here is imported by the runtime: `kvconv build` compiles the
kernels, the op library launches what was compiled.

All declare their arguments under the names and in the order of the launcher
(`custom_ops/src/cuda/arguments.h`); one that a variant does not take is the constexpr None. Behind
them come the constexprs, the same for all:

    HEAD_DIM, VALUE_HEAD_DIM   numbers of a key and of a value
    GROUP                      query heads that share a key/value head
    ROTARY_DIM                 numbers that are rotated, 0 = none
    FEATURES                   sum of the bits in `rows.FEATURES`
    CACHE_BITS                 8 or 4 where the cache is quantised (kvconv/cache_format.h), else 0
    TILE_M, TILE_N             rows and slots of a program's tile

Letters in comments are those of custom_ops/include/kvconv/attention.h.
"""

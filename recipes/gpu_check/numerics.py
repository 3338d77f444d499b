"""What the op gives on a GPU, compared with float64 arithmetic."""

import dataclasses
from collections.abc import Iterable

import torch
from attention_case import Case, Op, expect

from kvconv.custom_ops.triton.pack import write_pack
from kvconv.custom_ops.triton.variants import GPUS, Feature, list_variants
from kvconv.custom_ops.triton.worker import compile_variants
from kvconv.errors import ExportError

C, R, M = Feature.CAUSAL, Feature.ROTARY, Feature.MASK
BASE = Case(features=C | R | M)
_WINDOW = dataclasses.replace(BASE, features=C | R | M | Feature.WINDOW, window=48)

CASES = [
    BASE,
    *(dataclasses.replace(BASE, head_dim=w, value_head_dim=w) for w in (80, 96, 128, 192, 256)),
    dataclasses.replace(BASE, head_dim=192, value_head_dim=128, kv_num_heads=8),
    *(dataclasses.replace(BASE, dtype=d, cache=c) for d, c in (
        (torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "int8"),
        (torch.float16, "int4"), (torch.bfloat16, "int8"), (torch.float32, "int4"),
    )),
    *(dataclasses.replace(BASE, head_dim=w, value_head_dim=w, cache=c)
      for w in (96, 128) for c in ("int8", "int4")),
    dataclasses.replace(BASE, kv_num_heads=8),
    dataclasses.replace(BASE, kv_num_heads=1),
    dataclasses.replace(BASE, features=Feature(0)),
    dataclasses.replace(BASE, features=C),
    dataclasses.replace(BASE, features=C | R | Feature.ROTARY_INTERLEAVED, rotary_dim=32),
    _WINDOW,
    dataclasses.replace(_WINDOW, features=_WINDOW.features | Feature.RING),
    dataclasses.replace(_WINDOW, features=_WINDOW.features | Feature.RING, cache="int8"),
    dataclasses.replace(BASE, features=C | R | M | Feature.SOFTCAP | Feature.SINK),
    dataclasses.replace(BASE, features=C | M | Feature.ALIBI),
    dataclasses.replace(BASE, features=C | Feature.BIAS),
]  # fmt: skip
"""One attention of each kind that the kernels tell apart."""

_RUNS = (67, 1, 30, 1, 1)
"""New tokens of runs one behind the other: prefills and decode steps."""
_TOLERANCES = {"float32": 2e-3, "float16": 4e-3, "bfloat16": 2e-2, "int8": 2e-2, "int4": 1.5e-1}
"""Largest root mean square of the differences, by that of what is right."""


def this_gpu() -> tuple[str, str]:
    """Return this GPU's compute capability, and the GPU to compile for that it runs best.

    Raises:
        ExportError: kvconv compiles for none that is like it.
    """
    major, minor = torch.cuda.get_device_capability()
    likes = [
        (gpu.compute_capability, name)
        for name, gpu in GPUS.items()
        if gpu.compute_capability // 10 == major and gpu.compute_capability % 10 <= minor
    ]
    if not likes:
        raise ExportError(
            f"This GPU has compute capability {major}.{minor}; kvconv compiles for "
            f"{', '.join(GPUS)}, and runs PTX on others, which is not measured here."
        )
    return f"{major}.{minor}", max(likes)[1]


def compile_for(gpu: str, cases: Iterable[Case]) -> bytes:
    """Return a file of kernels that has those of all cases."""
    variants = list_variants([case.attention for case in cases], [gpu])
    return write_pack(compile_variants([v for v in variants if not v.is_ptx]))


def check(kernels: bytes) -> list[str]:
    """Run all cases; return a sentence for each wrong result."""
    torch.manual_seed(0)
    wrong = []
    for case in CASES:
        for error in errors_of(case, kernels):
            tolerance = max(_TOLERANCES[str(case.dtype)[6:]], _TOLERANCES[case.cache])
            if not error.value <= tolerance:  # NaN is wrong as well
                wrong.append(
                    f"{case}: {error.what} differs by {error.value:.2g} of what is right; "
                    f"{tolerance:.2g} may be"
                )
    return wrong


@dataclasses.dataclass(frozen=True)
class Error:
    """The root mean square of the differences of a run, by that of what is right."""

    what: str
    value: float


def errors_of(case: Case, kernels: bytes) -> list[Error]:
    """Run a case's prefills and decode steps; return how far each is off."""
    # A ring has room for its window and a run; others for everything, and what is no multiple.
    capacity = case.window + max(_RUNS) if Feature.RING in case.features else sum(_RUNS) + 13
    op = Op(case, kernels, capacity)
    if "attention_mask" in op.constants:  # as wide as the text, which a ring is not
        mask = torch.ones(case.batch, sum(_RUNS) + 13, dtype=torch.int64, device="cuda")
        mask[0, :3] = 0
        op.constants["attention_mask"] = mask
    runs, errors, past = [], [], 0
    for tokens in _RUNS:
        inputs, output = op.inputs(past, tokens), op.output(tokens)
        op.past.fill_(past)
        op.run(inputs, output)
        runs.append(inputs)
        right = expect(case, runs)
        difference = (output.double() - right).square().mean().sqrt()
        scale = right.square().mean().sqrt()
        errors.append(Error(f"a run of {tokens} tokens behind {past}", float(difference / scale)))
        past += tokens
    op.close()
    return errors

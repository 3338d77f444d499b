"""Kernels are compiled for GPUs that are not there; what does not fit them is refused."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the extra `build` is not installed")

from kvconv.custom_ops.triton.compile import (
    MAX_SPILL_BYTES,
    compile_variant,
    load_kernel,
    set_environment,
)
from kvconv.custom_ops.triton.variants import GPUS, PTX_GPU, Attention, Feature, Kind, Variant
from kvconv.errors import ExportError

pytestmark = pytest.mark.kernels

ATTENTION = Attention(10, 10, 64, 64, 3, 64, Feature.ROTARY | Feature.MASK | Feature.CAUSAL)
COMBINE = Variant(Kind.COMBINE, ATTENTION, GPUS["sm_80"])

ABI_OF_CUDA_12 = 7
"""Drivers of CUDA 12 load no cubin for older GPUs than Blackwell that has a higher one."""


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    for name in ("TRITON_INTERPRET", "TRITON_DISABLE_LINE_INFO", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    set_environment()


def stub(name):
    import stub_kernels

    return lambda variant: getattr(stub_kernels, name)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("cache", [10, 2])
def test_kernels_declare_all_that_variants_take_in_their_order(kind, cache):
    every = ATTENTION._replace(cache_type=cache, features=Feature(1023))
    variant = Variant(kind, every, GPUS["sm_80"])
    parameters = load_kernel(variant).arg_names
    taken = [name for name in parameters if name in variant.signature]
    assert tuple(taken) == variant.arguments
    assert parameters[-len(variant.constants) :] == list(variant.constants)
    # What no variant ever takes would be None in all of them.
    assert len(parameters) - len(variant.constants) - len(taken) == (
        0 if cache == 2 else len(set(parameters) & {"present_key_scale", "present_value_scale"})
    )


@pytest.mark.parametrize("kind", [Kind.APPEND, Kind.DECODE, Kind.PREFILL])
@pytest.mark.parametrize("types", [(1, 1), (16, 16), (16, 2), (1, 3)])
def test_kernels_of_other_types_compile_and_fit_the_smallest_gpu(kind, types):
    attention = ATTENTION._replace(activation_type=types[0], cache_type=types[1])
    compiled = compile_variant(Variant(kind, attention, GPUS["sm_86"]))
    assert compiled.function == f"{kind.name.lower()}_kernel"
    assert compiled.spill_bytes <= MAX_SPILL_BYTES


def target_of(cubin):
    """The GPU that the header of a cubin names."""
    flags = int.from_bytes(cubin[48:52], "little")
    return flags >> 8 & 0xFF if cubin[8] > ABI_OF_CUDA_12 else flags & 0xFF


@pytest.mark.parametrize("gpu", GPUS)
def test_cubin_of_each_gpu_is_for_that_gpu_and_small(gpu):
    compiled = compile_variant(COMBINE._replace(gpu=GPUS[gpu]), stub("copy_kernel"))
    assert compiled.image[:4] == b"\x7fELF"
    assert compiled.function == "copy_kernel"
    assert compiled.num_warps == 4
    assert 0 < compiled.registers <= 255
    assert compiled.spill_bytes == 0
    assert len(compiled.image) < 20_000
    assert target_of(compiled.image) == GPUS[gpu].compute_capability
    # Blackwell has the newer one from all of its drivers on.
    assert compiled.image[8] <= ABI_OF_CUDA_12 or GPUS[gpu].compute_capability >= 100


def test_ptx_is_text_of_the_old_version_with_a_final_zero():
    compiled = compile_variant(COMBINE._replace(gpu=PTX_GPU, is_ptx=True), stub("copy_kernel"))
    text = compiled.image.decode()
    assert text.endswith("\0")
    assert ".version 7.4" in text
    assert ".target sm_80" in text
    assert ".loc" not in text


def test_shared_memory_beyond_the_gpus_limit_and_spills_are_refused():
    with pytest.raises(ExportError, match=r"sm_80 .* bytes of spilled registers; at most"):
        compile_variant(COMBINE, stub("large_kernel"))
    with pytest.raises(ExportError, match=r"sm_86 .* bytes of shared memory; at most 101376"):
        compile_variant(COMBINE._replace(gpu=GPUS["sm_86"]), stub("large_kernel"))


def test_kernel_that_lacks_a_parameter_is_refused():
    with pytest.raises(ExportError, match="no parameters partial_output, partial_maximum"):
        compile_variant(COMBINE, stub("lacking_kernel"))


def test_kernel_that_does_not_compile_is_refused_with_its_variant():
    odd = COMBINE._replace(attention=ATTENTION._replace(value_head_dim=80))
    with pytest.raises(ExportError, match=r"combine sm_80 float16.*does not compile"):
        compile_variant(odd, stub("copy_kernel"))


_PROGRAM = """
import sys
from kvconv.custom_ops.triton import compile, variants
compile.set_environment()
import stub_kernels
gpu = variants.GPUS[sys.argv[1]]
attention = variants.Attention(10, 10, 64, 64, 3, 0, variants.Feature.SINK)
variant = variants.Variant(variants.Kind.COMBINE, attention, gpu, sys.argv[2] == "ptx")
image = compile.compile_variant(variant, lambda _: stub_kernels.copy_kernel).image
sys.stdout.buffer.write(image)
"""


@pytest.mark.parametrize("target", [("sm_90", "cubin"), ("sm_80", "ptx")])
def test_image_holds_no_paths_and_is_the_same_from_elsewhere(tmp_path, target):
    images = []
    for name in ("one", "another"):
        folder = tmp_path / name
        folder.mkdir()
        source = os.path.join(os.path.dirname(__file__), "stub_kernels.py")
        (folder / "stub_kernels.py").write_bytes(open(source, "rb").read())
        images.append(
            subprocess.run(
                [sys.executable, "-c", _PROGRAM, *target],
                env={**os.environ, "TMPDIR": str(folder), "TRITON_CACHE_DIR": str(folder / "c")},
                cwd=folder,
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
        )
    assert images[0] == images[1]
    assert b"stub_kernels.py" not in images[0]
    assert str(tmp_path).encode() not in images[0]

"""The CUDA op end to end without a GPU: the installed library over a shim of the driver.

The shim compares each launch with what the image says of its kernel's parameters, and the kernels
are done in numpy (`cuda/contract.py`) or by Triton's interpreter.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvconv.bench.bare_op import BareOp
from kvconv.errors import KvconvError
from kvconv.runtime import cuda

FOLDER = Path(__file__).parent
SHIM = FOLDER / "native/cuda_shim.cc"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    compiler = os.environ.get("CXX") or shutil.which("c++")
    library = tmp_path_factory.mktemp("shim") / cuda.DRIVER_LIBRARY
    command = [compiler, "-std=c++20", "-shared", "-fPIC", "-O1"]
    command += [f"-Wl,-soname,{library.name}", str(SHIM), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def run_cases(shim, mode, count, **variables):
    result = subprocess.run(
        [sys.executable, str(FOLDER / "cuda/run_cases.py"), str(shim), mode],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == count, result.stdout


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the shim is Linux's libcuda.so.1")


@on_linux
def test_every_case_gives_what_the_oracle_says(shim):
    run_cases(shim, "numpy", 26)


@on_linux
@pytest.mark.kernels
def test_triton_kernels_give_what_the_oracle_says(shim):
    pytest.importorskip("triton", reason="pip install 'kvconv[build]'")
    run_cases(shim, "interpreter", 6, TRITON_INTERPRET="1")


@on_linux
@pytest.mark.kernels
def test_compiled_kernels_are_launched_as_their_images_say(shim):
    pytest.importorskip("triton", reason="pip install 'kvconv[build]'")
    run_cases(shim, "compiled", 2)


def bare_op(kernels):
    return BareOp(
        activation=10,
        cache=10,
        attributes={"num_heads": 2, "kv_num_heads": 1},
        kernels=kernels,
        allocate=lambda _: 0,
        free=lambda _: None,
    )


def test_damaged_kernels_are_refused():
    with pytest.raises(KvconvError, match="does not begin as a kernel pack does"):
        bare_op(b"x" * 100)


def test_no_driver_is_said():
    if cuda.why_unavailable() is None:
        pytest.skip("this machine has CUDA")
    from kernel_packs import write_pack

    with pytest.raises(KvconvError, match=r"no NVIDIA driver was found \(libcuda.so.1\)"):
        bare_op(write_pack([]))


def test_types_that_no_kernel_takes_are_refused():
    with pytest.raises(KvconvError, match="takes no activations of ONNX type 11"):
        BareOp(
            activation=11,
            cache=10,
            attributes={},
            kernels=b"",
            allocate=lambda _: 0,
            free=lambda _: None,
        )

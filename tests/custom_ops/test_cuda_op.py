"""The CUDA op end to end without a GPU: the installed library, a shim of the driver, numpy kernels.

The shim compares each launch with what the image says of its kernel's parameters.
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


@pytest.mark.skipif(sys.platform != "linux", reason="the shim is Linux's libcuda.so.1")
def test_every_case_gives_what_the_oracle_says(shim):
    script = FOLDER / "cuda/run_cases.py"
    result = subprocess.run(
        [sys.executable, str(script), str(shim)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 26, result.stdout


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

"""The virtual environments of the peers: made once, versions pinned, reused when complete."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

TORCH = ("torch==2.13.0",)


@dataclass(frozen=True, slots=True)
class Environment:
    """What is installed, in order.

    Attributes:
        requirements: One pip call each. torch comes alone and first, so that the build which the
            index offers for this machine stays.
        options: More arguments of the last pip call.
        variables: More environment variables of pip.
        imports: Modules that show that the environment is complete.
    """

    requirements: tuple[tuple[str, ...], ...]
    imports: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


ENVIRONMENTS = {
    # Its model builder needs transformers 5, so the peer `transformers` runs here, too.
    "genai": Environment(
        (
            TORCH,
            (
                "onnxruntime-genai==0.18.0",
                "transformers==5.24.0",
                "onnx==1.23.2",
                "onnx_ir==1.1.0",
                "gguf==0.19.0",
                "accelerate==1.15.0",
            ),
        ),
        ("onnxruntime_genai", "transformers", "gguf", "accelerate"),
    ),
    "openvino": Environment(
        (("openvino-genai==2026.4.1.0", "numpy==2.4.6"),), ("openvino_genai", "numpy")
    ),
    # Without accelerate, optimum writes a tied embedding twice. transformers becomes 4.57 here.
    "optimum": Environment(
        (TORCH, ("optimum-onnx[onnxruntime]==0.1.0", "accelerate==1.15.0")),
        ("optimum.onnxruntime", "accelerate"),
    ),
    # There are no wheels of it: a C++ compiler works for 10 minutes and more.
    "llamacpp": Environment(
        (("llama-cpp-python==0.3.36", "numpy==2.4.6"),),
        ("llama_cpp",),
        options=("--no-binary", "llama-cpp-python"),
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
    ),
}


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made if it is not there or incomplete.

    Args:
        name: One of ENVIRONMENTS.
        folder: Holds all environments.
    """
    environment = ENVIRONMENTS[name]
    python = folder / name / "bin" / "python"
    check = "; ".join(f"import {module}" for module in environment.imports)
    if (
        python.exists()
        and subprocess.run([python, "-c", check], capture_output=True).returncode == 0
    ):
        return python
    print(f"making the environment {folder / name} ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    for requirements in environment.requirements:
        is_last = requirements == environment.requirements[-1]
        subprocess.run(
            [
                *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *(environment.options if is_last else ()),
                *requirements,
            ],
            check=True,
            env={**os.environ, **environment.variables},
        )
    subprocess.run([python, "-c", check], check=True)
    return python

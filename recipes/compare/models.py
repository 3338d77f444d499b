"""The peers' own forms of one model: built once, below one folder, from a GGUF file.

FOLDER/hf/NAME                  safetensors in float32, as transformers reads the GGUF file
FOLDER/f16/NAME.gguf            the same weights as float16
FOLDER/genai-KIND/NAME          of onnxruntime-genai's model builder
FOLDER/optimum/NAME             of optimum's exporter
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from environments import python_of

HERE = Path(__file__).parent
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

# kind -> arguments of onnxruntime-genai's builder
GENAI_KINDS: dict[str, tuple[str, ...]] = {
    "genai-fp32": ("-p", "fp32"),
    "genai-fp32-prune": ("-p", "fp32", "--extra_options", "prune_lm_head=true"),
    "genai-int4": ("-p", "int4"),
    "genai-int4-prune": ("-p", "int4", "--extra_options", "prune_lm_head=true"),
}


class Models:
    """Builds what a peer needs and returns its path.

    Args:
        gguf: The model.
        folder: Where built forms are kept.
        environments: Folder of the virtual environments.
        name: Of the model, in the paths.
    """

    def __init__(self, gguf: Path, folder: Path, environments: Path, name: str) -> None:
        self.gguf = gguf
        self._folder = folder
        self._environments = environments
        self._name = name

    def hf(self) -> Path:
        """Return a folder of safetensors."""

        def build(partial: Path) -> None:
            script = HERE / "convert" / "gguf_to_hf.py"
            self._python("genai", script, self.gguf, partial)

        return self._built("hf", build)

    def float16_gguf(self) -> Path:
        """Return a GGUF file with float16 weights."""
        target = self._folder / "f16" / f"{self._name}.gguf"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            self._python("genai", HERE / "convert" / "gguf_to_float16.py", self.gguf, partial)
            partial.rename(target)
        return target

    def genai(self, kind: str) -> Path:
        """Return a folder of onnxruntime-genai's builder; kind is one of GENAI_KINDS."""

        def build(partial: Path) -> None:
            cache = self._folder / "genai-cache"
            self._python(
                *("genai", "-m", "onnxruntime_genai.models.builder", "-m", self.hf()),
                *("-o", partial, "-e", "cpu", "-c", cache, *GENAI_KINDS[kind]),
            )

        return self._built(kind, build)

    def optimum(self) -> Path:
        """Return a folder of optimum's exporter."""

        def build(partial: Path) -> None:
            source = self._copy_for_transformers_4(self.hf())
            self._python(
                *("optimum", "-m", "optimum.exporters.onnx", "--model", source),
                *("--task", "text-generation-with-past", partial),
            )

        return self._built("optimum", build)

    def _copy_for_transformers_4(self, source: Path) -> Path:
        """Return a folder of links whose config has rope_theta where transformers 4 reads it.

        Without that it takes 10000, says nothing, and another model is measured.
        """
        target = self._folder / "hf-transformers-4" / self._name
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            link = target / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
        config = json.loads((source / "config.json").read_text())
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]
        (target / "config.json").unlink()
        (target / "config.json").write_text(json.dumps(config))
        return target

    def _built(self, kind: str, build: Callable[[Path], None]) -> Path:
        target = self._folder / kind / self._name
        if not target.exists():
            print(f"building {target} ...", file=sys.stderr, flush=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{self._name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a build that was interrupted
            build(partial)
            partial.rename(target)
        return target

    def _python(self, environment: str, *arguments: object) -> None:
        python = python_of(environment, self._environments)
        subprocess.run(
            [python, *map(str, arguments)],
            check=True,
            stdout=sys.stderr,
            env={**os.environ, **_OFFLINE},
        )

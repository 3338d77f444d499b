"""A bundle on disk: found, checked against its manifest, and read only through it.

Nothing of a bundle is executed here, and no file is read here that the manifest does not list.
(ONNX Runtime reads the weights file that the graph names; `kvconv inspect --check` looks at that.)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconv.errors import BundleError
from kvconv.manifest import Manifest, check_files, read_manifest
from kvconv.names import MODEL_FILE


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle.

    Attributes:
        path: The folder.
        manifest: What `kvconv.json` says.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path) -> "Bundle":
        """Read the manifest and compare the files with it; large ones by size alone.

        Args:
            path: The folder that `kvconv export` wrote.

        Raises:
            BundleError: The folder is missing, damaged, incomplete or of a newer format.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        check_files(folder, manifest)
        bundle = cls(folder, manifest)
        bundle.file(MODEL_FILE)
        return bundle

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    def file(self, name: str) -> Path:
        """Return the path of a file that the manifest lists.

        Raises:
            BundleError: The manifest does not list it.
        """
        if name not in self:
            raise BundleError(
                f"The bundle {self.path} has no {name}. Export the model again.", file=name
            )
        return self.path / name

    def read_json(self, name: str) -> dict[str, Any]:
        """Parse a JSON file that the manifest lists.

        Raises:
            BundleError: It is not listed, or not a JSON object.
        """
        path = self.file(name)
        try:
            value = json.loads(path.read_bytes())
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise BundleError(
                f"{name} in {self.path} is not JSON ({error}). Export the model again.", file=name
            ) from error
        if not isinstance(value, dict):
            raise BundleError(
                f"{name} in {self.path} is not a JSON object. Export the model again.", file=name
            )
        return value

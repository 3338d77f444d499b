"""Bundles of the real models, each exported once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from real_models import MODELS


@pytest.fixture(scope="session")
def export(tmp_path_factory):
    """Return a function that exports one model in one flavour, once a session."""
    folder, done = tmp_path_factory.mktemp("bundles"), {}

    def run(name: str, attention: str = "flash", weights: str = "") -> Path:
        bundle = folder / f"{name} {attention} {weights}".strip()
        if bundle not in done:
            arguments = ["export", str(MODELS[name]), "-o", str(bundle)]
            if attention != "flash":
                arguments += ["--attention", attention, "--no-verify"]
            if weights:
                arguments += ["--weights", weights]
            command = [sys.executable, "-c", "from kvconv.cli import main; main()"]
            subprocess.run(
                [*command, *arguments, "--json"], check=True, env=os.environ, stdout=sys.stderr
            )
            done[bundle] = True
        return bundle

    return run

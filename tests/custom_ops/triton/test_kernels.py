"""The Triton kernels in Triton's interpreter against the float64 oracle; cases.py has the cases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the CUDA kernels need triton: pip install 'kvconv[build]'")

CASES = Path(__file__).with_name("cases.py")


@pytest.mark.kernels
@pytest.mark.parametrize(("part", "count"), [("sizes", 25), ("prefill", 57), ("decode", 59)])
def test_every_case_gives_what_the_oracle_says(part: str, count: int) -> None:
    result = subprocess.run(
        [sys.executable, CASES, part],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    outcomes = json.loads(result.stdout)
    assert len(outcomes) == count, list(outcomes)
    wrong = {name: what for name, what in outcomes.items() if what}
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())

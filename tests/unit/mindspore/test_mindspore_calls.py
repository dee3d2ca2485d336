"""What everyday calls compute is what MindSpore computes: tests/cases/mindspore_calls.py under both."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mindspore_calls
import numpy as np
import pytest

import msrun.mindspore as ms

REAL = os.environ.get("MINDSPORE_PYTHON", "")
"""A Python that has MindSpore, read before a test begins without such variables."""
STORED = Path(__file__).parents[2] / "golden" / "mindspore_calls.json"


def is_near(a: Any, b: Any) -> bool:
    """Shapes and types are equal, numbers nearly: MindSpore's kernels for the CPU estimate roots and exponentials."""
    if isinstance(a, dict) and isinstance(b, dict):
        same = a["shape"] == b["shape"] and a["type"] == b["type"]
        return same and np.allclose(
            a["numbers"], b["numbers"], rtol=2e-3 if a["type"] == "float16" else 3e-4, atol=2e-5
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_near, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-5
    return bool(a == b)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_one_line_calls_give_what_real_mindspore_gives() -> None:
    stored = json.loads(STORED.read_text())
    assert list(stored) == mindspore_calls.CALLS, "make the table again: python tests/cases/mindspore_calls.py"
    ours = mindspore_calls.results(ms)
    assert {call: (stored[call], ours[call]) for call in stored if not is_near(stored[call], ours[call])} == {}


@pytest.mark.slow
def test_the_stored_table_is_what_mindspore_computes(tmp_path: Path) -> None:
    if not REAL:
        pytest.skip("MindSpore is not there: MINDSPORE_PYTHON names no Python that has it")
    command = [REAL, mindspore_calls.__file__]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=True)
    found, stored = json.loads(done.stdout), json.loads(STORED.read_text())
    assert {
        call: (stored[call], found.get(call)) for call in stored if not is_near(stored[call], found.get(call))
    } == {}

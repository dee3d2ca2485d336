"""What everyday calls and scripts give is what MindSpore gives: tests/cases/mindspore_*.py under both."""

import contextvars
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import mindspore_calls
import numpy as np
import pytest

import msrun.mindspore as ms
from msrun.mindspore.import_paths import pose_as_mindspore

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = Path(mindspore_calls.__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "from_mindspore.md"
NUMBER = re.compile(r"(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|\bnan\b|\binf\b)")


def is_near(a, b):
    """Shapes, types and words are equal, numbers nearly: MindSpore's kernels for the CPU estimate roots and
    exponentials."""
    if isinstance(a, dict) and isinstance(b, dict):
        same = a["shape"] == b["shape"] and a["type"] == b["type"]
        return same and np.allclose(
            a["numbers"], b["numbers"], rtol=2e-3 if a["type"] == "float16" else 3e-4, atol=2e-5, equal_nan=True
        )
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(is_near, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) < 1e-5
    return bool(a == b)


def is_near_text(a, b):
    """Printed words are equal but for spaces, numbers nearly."""
    first, second = NUMBER.split(a), NUMBER.split(b)
    words = [["".join(word.split()) for word in parts[::2]] for parts in (first, second)]
    return words[0] == words[1] and np.allclose(
        list(map(float, first[1::2])), list(map(float, second[1::2])), rtol=3e-4, atol=2e-5, equal_nan=True
    )


@pytest.fixture
def mindspore_scripts(monkeypatch):
    """The scripts, in a process where `import mindspore` finds msrun.mindspore."""
    before = set(sys.modules)
    pose_as_mindspore("msrun.mindspore")
    try:
        yield importlib.import_module("mindspore_scripts")
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] in ("mindspore", "mindspore_scripts"):
                del sys.modules[name]


def differing(stored, found, is_equal):
    return {name: (stored[name], found.get(name)) for name in stored if not is_equal(stored[name], found.get(name))}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_one_line_calls_give_what_real_mindspore_gives():
    stored = json.loads((GOLDEN / "mindspore_calls.json").read_text())
    found = differing(stored, contextvars.copy_context().run(mindspore_calls.results, ms), is_near)
    assert {name: pair for name, pair in found.items() if name not in mindspore_calls.DIFFERENT} == {}
    assert set(mindspore_calls.DIFFERENT) <= set(found), "equal by now: take it out of the table"


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_scripts_print_what_they_print_with_real_mindspore(mindspore_scripts):
    stored = json.loads((GOLDEN / "mindspore_scripts.json").read_text())
    assert list(stored) == list(mindspore_scripts.SCRIPTS), (
        "make the table again: python tests/cases/mindspore_scripts.py"
    )
    found = differing(stored, contextvars.copy_context().run(mindspore_scripts.results), is_near_text)
    assert {name: pair for name, pair in found.items() if name not in mindspore_scripts.DIFFERENT} == {}
    assert set(mindspore_scripts.DIFFERENT) <= set(found), "equal by now: take it out of the table"


def test_the_page_has_every_known_difference(mindspore_scripts):
    page = PAGE.read_text()
    reasons = {*mindspore_calls.DIFFERENT.values(), *mindspore_scripts.DIFFERENT.values()}
    assert {reason for reason in reasons if reason not in page} == set()
    assert f"{len(mindspore_calls.CALLS)} one-line calls and {len(mindspore_scripts.SCRIPTS)} short scripts" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_equal"), [("mindspore_calls", is_near), ("mindspore_scripts", is_near_text)], ids=["calls", "scripts"]
)
def test_the_stored_table_is_what_mindspore_gives(mindspore_python, tmp_path, name, is_equal):
    command = [mindspore_python, str(CASES / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=True)
    assert differing(json.loads((GOLDEN / f"{name}.json").read_text()), json.loads(done.stdout), is_equal) == {}

"""Imports are not searched for garbage, and the collector works as before afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]

IMPORT = """
import gc
from msrun.agent.processes.fork_server import collection_paused
gc.set_threshold(50, 5, 5)
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
with collection_paused():
    for _ in range(2):  # from Python 3.12 on a collection that was due before comes at the next jump
        rounds.clear()
    kept = [[number] for number in range(10_000)]
    {module}
print(len(rounds), gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 10_000)
more = [[number] for number in range(10_000)]
print(len(rounds) > 0)
"""


@pytest.mark.parametrize(
    ("module", "thresholds", "is_enabled", "collects"),
    [
        ("pass", (50, 5, 5), True, True),
        ("gc.set_threshold(900, 9, 9)", (900, 9, 9), True, True),
        ("gc.disable()", (50, 5, 5), False, False),
    ],
    ids=["as before", "own thresholds", "turned off"],
)
def test_imports_are_not_searched_for_garbage_and_what_modules_set_stays(
    module: str, thresholds: tuple[int, ...], is_enabled: bool, collects: bool
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT.format(module=module)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    inside, afterwards = done.stdout.splitlines()
    assert inside == f"0 {thresholds} {is_enabled} True"
    assert afterwards == str(collects)

"""Loops of other libraries train a cut GPT-2 with the losses of one process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from job_runner import JobRunner

DEADLINE_S = 300.0
NEEDS = {"accelerate": "accelerate", "trainer": "accelerate", "fabric": "lightning", "peft": "peft"}


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("library", NEEDS)
def test_a_library_trains_a_cut_model_as_one_process(
    msrun: JobRunner, workers: Path, tmp_path: Path, library: str
) -> None:
    for needed in ("transformers", NEEDS[library]):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install -e '.[test,zoo]'")
    program = workers / "runtime" / "integrations.py"
    msrun.run_world(2, program, library, tmp_path, cwd=tmp_path, deadline_s=DEADLINE_S)
    subprocess.run([sys.executable, program, library, tmp_path], check=True, timeout=DEADLINE_S, env=msrun.environ())
    cut, plain = (json.loads(Path(tmp_path, name).read_text()) for name in ("cut.json", "plain.json"))
    assert len(plain) == 20
    assert cut == pytest.approx(plain, rel=1e-5)
    assert library == "fabric" or any(Path(tmp_path, "saved").glob("*.safetensors"))

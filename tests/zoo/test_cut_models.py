"""Models of transformers that a plan by names cuts are trained, called, saved and loaded as in one process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from job_runner import JobRunner

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install -e '.[test,zoo]'", allow_module_level=True)

MODELS = ("GPT-2", "Llama", "Qwen3", "Mixtral", "BERT", "T5", "ViT", "Whisper")
DEADLINE_S = 400.0


def numbers(found: Any) -> list[float]:
    if isinstance(found, dict):
        return [number for key in sorted(found) for number in numbers(found[key])]
    return [number for each in found for number in numbers(each)] if isinstance(found, list) else [found]


def check_equal(mine: dict[str, Any], right: dict[str, Any]) -> None:
    assert mine.keys() == right.keys()
    for key in right:
        found, expected = numbers(mine[key]), numbers(right[key])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5 * max(map(abs, expected))), key


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_cut_by_names_is_in_every_use_what_it_is_in_one_process(
    msrun: JobRunner, workers: Path, tmp_path: Path, model: str
) -> None:
    program = workers / "runtime" / "models.py"
    msrun.run_world(2, program, model, tmp_path, cwd=tmp_path, deadline_s=DEADLINE_S)
    subprocess.run([sys.executable, program, model, tmp_path], check=True, timeout=DEADLINE_S, env=msrun.environ())
    cut, plain, loaded = (json.loads(Path(tmp_path, f"{name}.json").read_text()) for name in ("cut", "plain", "loaded"))
    for key in ("outside", "at last"):
        check_equal(cut.pop(key), plain[key])
    check_equal(loaded, plain.pop("at last"))
    del plain["outside"]
    check_equal(cut, plain)

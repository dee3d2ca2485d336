"""Models of transformers that a plan by names cuts do as in one process, by themselves and in loops of libraries."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install -e '.[test,zoo]'", allow_module_level=True)

NEEDS = {
    **dict.fromkeys(("accelerate", "trainer"), "accelerate"),
    **dict.fromkeys(("fabric", "lightning"), "lightning"),
    "peft": "peft",
}
MODELS = ("GPT-2", "Llama", "Qwen3", "Mixtral", "BERT", "T5", "ViT", "Whisper")
DEADLINE_S = 400.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * DEADLINE_S)]


def numbers(found):
    if isinstance(found, dict):
        return [number for key in sorted(found) for number in numbers(found[key])]
    return [number for each in found for number in numbers(each)] if isinstance(found, list) else [found]


def check_equal(mine, right):
    assert mine.keys() == right.keys()
    for key in right:
        found, expected = numbers(mine[key]), numbers(right[key])
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5 * max(map(abs, expected))), key


def run(msrun, program, what, folder, *names):
    """Run a program on two ranks, then in one process; return what it has written."""
    msrun.run_world(2, program, what, folder, cwd=folder, deadline_s=DEADLINE_S)
    subprocess.run([sys.executable, program, what, folder], check=True, timeout=DEADLINE_S, env=msrun.environ())
    return [json.loads(Path(folder, f"{name}.json").read_text()) for name in names]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_cut_by_names_is_in_every_use_what_it_is_in_one_process(msrun, workers, tmp_path, model):
    cut, plain, loaded = run(msrun, workers / "runtime" / "models.py", model, tmp_path, "cut", "plain", "loaded")
    for key in ("outside", "at last"):
        check_equal(cut.pop(key), plain[key])
    check_equal(loaded, plain.pop("at last"))
    del plain["outside"]
    check_equal(cut, plain)


@pytest.mark.parametrize("library", NEEDS)
def test_a_library_trains_a_cut_model_as_one_process(msrun, workers, tmp_path, library):
    if importlib.util.find_spec(NEEDS[library]) is None:
        pytest.skip(f"{NEEDS[library]} is not installed: pip install -e '.[test,zoo]'")
    cut, plain = run(msrun, workers / "runtime" / "integrations.py", library, tmp_path, "cut", "plain")
    assert len(plain) == (42 if library == "trainer" else 22)
    assert cut == pytest.approx(plain, rel=1e-5)
    assert plain[-2] != pytest.approx(plain[0], rel=1e-4)

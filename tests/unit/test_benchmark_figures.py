"""Files of figures: what was measured, with the commit, the machine and the versions that it depends on."""

import json
import subprocess
import sys

from job_runner import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"
PROGRAM = """
import argparse
from pathlib import Path
from figures import add_json_option, kept, record

parser = argparse.ArgumentParser()
add_json_option(parser)
parser.add_argument("--interrupt", action="store_true")
options = parser.parse_args()
with kept(options.json):
    record("start", workers=2, median_s={"msrun": 0.5})
    if options.interrupt:
        raise KeyboardInterrupt
"""


def measure(folder, *words):
    (folder / "speed.py").write_text(PROGRAM)
    command = [sys.executable, str(folder / "speed.py"), *words]
    return subprocess.run(command, env={"PYTHONPATH": str(BENCHMARKS)}, capture_output=True, timeout=60).returncode


def test_what_was_run_on_what_with_what_is_kept_of_an_interrupted_benchmark_too_and_only_where_asked(tmp_path):
    path = tmp_path / "new folder" / "speed.json"
    assert measure(tmp_path, "--interrupt", "--json", str(path)) != 0
    found = json.loads(path.read_text())
    said = found["benchmark"], found["command"], found["date"][-6:]
    assert said == ("speed", "python benchmarks/speed.py --interrupt", "+00:00"), "wherever the file is"
    assert found["versions"]["python"] == sys.version.split()[0] and "click" in found["versions"]
    assert {"commit", "is_changed", "load"} <= set(found) and found["machine"]["cores"] >= 1
    assert found["figures"] == [{"part": "start", "workers": 2, "median_s": {"msrun": 0.5}}]
    assert measure(tmp_path) == 0 and {path.name for path in tmp_path.iterdir()} == {"speed.py", "new folder"}

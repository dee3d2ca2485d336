"""A dry run's one process: what is said of its end."""

import pytest

from msrun.launch.simulation import Simulation, run_simulation
from msrun.planning.program import Program

WRITES = "touch $MSRUN_LOG_DIR/simulation.json $MSRUN_LOG_DIR/simulation.html"
HINT = "calls init_process_group(), which finds no other ranks in a dry run: call msrun.runtime.init() instead"


def shell(text):
    return Program("executable", "/bin/sh", args=("-c", text))


@pytest.mark.parametrize(
    ("program", "quiet", "status", "said"),
    [
        (shell(WRITES), False, 0, "msrun: wrote {}/logs/simulation.json, simulation.html\n"),
        (shell(WRITES), True, 0, ""),
        (shell("kill -TERM $$"), False, 143, ""),
        (Program("script", "x.py"), False, 1, f"msrun: x.py {HINT}, and train with msrun.runtime.AutoParallel\n"),
    ],
)
def test_end_of_the_script_is_that_of_msrun(tmp_path, capsys, program, quiet, status, said):
    (tmp_path / "x.py").write_text("init_process_group()\n")
    report = tmp_path / "logs" / "simulation.json"
    report.parent.mkdir()
    report.write_text("of an earlier dry run")
    place = {"global_rank": 0, "device": "cpu", "working_directory": tmp_path, "log_dir": report.parent}
    simulation = Simulation(program=program, level=1, worker_num=1, local_worker_num=1, **place)
    assert run_simulation(simulation, {"PATH": "/usr/bin:/bin"}, quiet=quiet) == status
    assert capsys.readouterr().err == said.format(tmp_path)
    assert report.exists() == (status == 0)

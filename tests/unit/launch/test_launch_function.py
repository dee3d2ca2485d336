"""`msrun.run` where its job fails or is interrupted, against a command in the place of msrun."""

import sys

import pytest

from msrun.errors import UsageError, WorkerFailed
from msrun.launch.function import run

FAILED = """for folder; do :; done
echo '{"ranks": 1, "log_dir": "'$folder'"}' > $folder/job
echo '{"reason": "rank 0 failed", "first_failure": null}' > $folder/failure.json
exit 9
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Puts a shell script in the place of the interpreter that is to run msrun."""

    def put(text):
        (tmp_path / "sh").write_text(f"#!/bin/sh\n{text}")
        (tmp_path / "sh").chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "sh"))

    return put


def test_job_that_fails_is_told_by_its_report_or_by_the_status_of_msrun(command, capsys):
    command("echo hello; exit 4")
    with pytest.raises(UsageError, match=r"^msrun --worker_num=3 .*--quiet has ended with 4: the function has run"):
        run(len, ((),), workers=3, options=["--quiet"])
    assert capsys.readouterr().out == "hello\n"
    command(FAILED)
    with pytest.raises(WorkerFailed, match=r"^rank 0 failed") as failed:
        run(len, ((),))
    assert failed.value.exit_code == 9


def test_interrupt_ends_the_job(command, tmp_path, monkeypatch):
    command(f"trap 'echo SIGINT > {tmp_path}/ended; exit' INT; echo line; while :; do sleep 0.01; done")

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.stdout, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(len, ((),))
    assert (tmp_path / "ended").read_text() == "SIGINT\n"

"""A progress bar of a worker can be seen while it runs: in place on a terminal, byte for byte with --raw."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from asked_cases import one_fast
from job_runner import MARK, JobRunner
from terminal import DEADLINE_S, Terminal

BAR = """
import os, sys, time
sys.stderr.write("epoch 1\\n\\r 10%|#  |")
sys.stderr.flush()
while not os.path.exists("go"):
    time.sleep(0.01)
sys.stderr.write("\\r 20%|## |\\r100%|###|\\n")
"""
BYTES = b"epoch 1\n\r 10%|#  |\r 20%|## |\r100%|###|\n"
SHORT_STATES = "import msrun.launch.log_tail as t, msrun.cli; t.STATE_S = 0.0; msrun.cli.main()"


def hosts(count: int) -> list[str]:
    return ["--worker_num=1"] if count == 1 else [f"--rehearse={count}x1", f"--forward_env={MARK}"]


def test_bar_on_a_terminal_is_redrawn_in_place_and_stays_with_its_last_state(msrun: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text(BAR)
    with closing(Terminal(msrun, tmp_path, "--worker_num=2", "bar.py")) as terminal:
        terminal.read_until(b"epoch 1\r\n")
        terminal.read_until(b"\r\x1b[K 10%|#  |")
        (tmp_path / "go").touch()
        terminal.read_until(None)
        assert terminal.process.wait(DEADLINE_S) == 0
        assert b"\r\x1b[K100%|###|\r\n" in terminal.text
        assert terminal.text.count(b"100%|###|\r\n") == 1


@pytest.mark.parametrize("count", one_fast(1, 2))
def test_raw_bytes_come_unchanged_and_at_once(msrun: JobRunner, tmp_path: Path, count: int) -> None:
    (tmp_path / "bar.py").write_text(BAR)
    reader, writer = os.pipe()
    words = [sys.executable, "-m", "msrun", *hosts(count), "--raw", "--quiet", "bar.py"]
    job = subprocess.Popen(words, cwd=tmp_path, env=msrun.environ(), stdout=writer, stderr=writer)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as stream:
        begin = BYTES[: BYTES.index(b"\r 20%")]
        text = b""
        while len(text) < len(begin):
            data = stream.read(len(begin) - len(text))
            assert data, text
            text += data
        assert text == begin, "while the worker waits"
        (tmp_path / "go").touch()
        assert text + stream.readall() == BYTES
    assert job.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("count", one_fast(1, 2))
def test_bar_in_a_pipe_is_a_line_now_and_then(msrun: JobRunner, tmp_path: Path, count: int) -> None:
    (tmp_path / "bar.py").write_text(BAR)
    words = [sys.executable, "-c", SHORT_STATES, *hosts(count), "--quiet", "bar.py"]
    job = subprocess.Popen(words, cwd=tmp_path, env=msrun.environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == [b"epoch 1\n", b" 10%|#  |\n"], "while the worker waits"
    (tmp_path / "go").touch()
    rest = job.stdout.read().splitlines()
    assert rest[-1] == b"100%|###|" and rest.count(b"100%|###|") == 1
    job.stdout.close()
    assert job.wait(DEADLINE_S) == 0

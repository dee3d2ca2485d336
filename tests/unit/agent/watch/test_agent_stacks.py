"""Where running workers stand, as their stacks and the kernel tell, and whether one was killed for its memory."""

import os
import signal
import subprocess
import sys
import time

import pytest
from file_tree import grow
from job_runner import is_alive, wait_until

from msrun.agent.evidence import MemoryKillWatch, Place, find_place, kernel_state, read_place, request_stacks
from msrun.agent.processes.process_control import catches
from msrun.planning.environment import STACK_SIGNAL

TELLING = f"""
import faulthandler, time
faulthandler.register({int(STACK_SIGNAL)}, file=2, all_threads=True)
def deep_in_the_work():
    print("up", flush=True)
    time.sleep(1000)
deep_in_the_work()
"""
SILENT = "import time; print('up', flush=True); time.sleep(1000)"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "worker_0.log"


def start(source, log):
    with log.open("ab") as file:
        process = subprocess.Popen([sys.executable, "-c", source], stdout=file, stderr=file)
    wait_until(log.read_bytes, "worker is up")
    return process


@pytest.fixture
def telling(log):
    process = start(TELLING, log)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def silent(log):
    process = start(SILENT, log)
    yield process
    process.kill()
    process.wait()


def test_stopped_worker_is_woken_to_tell_below_the_headline_and_lives_on(telling, log):
    telling.send_signal(signal.SIGSTOP)
    wait_until(lambda: kernel_state(telling.pid) == "stopped by a signal", "worker is stopped")
    request_stacks({telling.pid: str(log)}, "stacks:")
    wait_until(lambda: "deep_in_the_work" in log.read_text(), "stacks are written")
    text = log.read_text()
    assert text.index("msrun: stacks:") < text.index("deep_in_the_work") and is_alive(telling.pid)


def test_worker_that_cannot_tell_lives_on_and_the_kernels_view_is_written(silent, log):
    assert not catches(silent.pid, STACK_SIGNAL)
    wait_until(lambda: kernel_state(silent.pid).startswith("sleeping"), "worker sleeps")
    request_stacks({silent.pid: str(log)}, "no progress")
    assert "cannot write its stacks; the kernel's view: sleeping" in log.read_text()
    assert is_alive(silent.pid) and kernel_state(1 << 30) == "gone"


TORCH = "/venv/lib/python3.11/site-packages/torch"
USER = ("/home/me/train.py", "41", "step")
C10D = (f"{TORCH}/distributed/distributed_c10d.py", "2900", "all_reduce")
LOGGER = (f"{TORCH}/distributed/c10d_logger.py", "83", "wrapper")
ENGINE = (f"{TORCH}/autograd/graph.py", "800", "_engine_run_backward")
BACKWARD = (f"{TORCH}/autograd/__init__.py", "347", "backward")
LINEAR = (f"{TORCH}/nn/modules/linear.py", "125", "forward")
DDP = (f"{TORCH}/nn/parallel/distributed.py", "1886", "forward")
SLEEP = ("/usr/lib/python3.11/threading.py", "300", "wait")


@pytest.mark.parametrize(
    ("frames", "line", "waits_in"),
    [
        ([USER], "", ""),
        ([C10D, LOGGER, USER], "", "all_reduce"),
        ([ENGINE, BACKWARD, USER], "", "backward"),
        ([LINEAR, DDP, USER], "", ""),  # it computes
        ([SLEEP, USER, C10D], "", ""),
        ([USER], "    work.wait()", "work.wait"),
        ([USER], "    self.work[0].wait(timeout)", "wait"),
        ([SLEEP, USER], "            self._cond.wait(timeout)", ""),  # a threading.Event
        ([("/venv/lib/python3.11/site-packages/x/comm.py", "7", "f"), USER], "w.wait()", "w.wait"),
        ([C10D, LOGGER], "", "all_reduce"),
    ],
)
def test_innermost_frames_and_the_line_of_the_first_tell_who_waits(frames, line, waits_in):
    found = find_place(frames, lambda file, number: line if (file, str(number)) == frames[0][:2] else "")
    assert found == Place(waits_in, "train.py:41 in step" if USER in frames else "")


LOG = """epoch 1
Current thread 0x01 (most recent call first):
  File "/home/me/old.py", line 1 in before
"""
STACKS = """
msrun: stuck
Thread 0x01 (most recent call first):
  File "/home/me/loader.py", line 7 in load

Current thread 0x02 (most recent call first):
  File "{folder}/my file.py", line {line} in <module>
"""


@pytest.mark.parametrize(("line", "waits"), [(1, ""), (2, "waits in work.wait "), (3, ""), (0, "")])
def test_the_main_thread_counts_and_only_what_came_after_the_wish(tmp_path, line, waits):
    log = tmp_path / "log"
    log.write_text(LOG + STACKS.format(folder=tmp_path, line=line))
    (tmp_path / "my file.py").write_text("work = send()\nwork.wait()")
    place = read_place(str(log), len(LOG))
    assert place is not None and place.describe() == f"{waits}at my file.py:{line} in <module>"


@pytest.mark.parametrize("text", ["", "nothing of the kind\n", "Thread 0x01 (most recent call first):\n"])
def test_a_log_without_stacks_tells_nothing(tmp_path, text):
    (tmp_path / "log").write_text(text)
    assert read_place(str(tmp_path / "log"), 0) is None
    assert read_place(str(tmp_path / "missing"), 0) is None


MOUNTS = (
    "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    "31 24 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    "32 24 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
)


class Kernel:
    """A folder that looks like / to the watch."""

    def __init__(self, root, *, cgroup):
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 3\n")
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", MOUNTS)

    def write(self, path, text):
        grow(self.root, {path: text})


@pytest.mark.parametrize(
    ("cgroup", "counter", "before", "after"),
    [
        ("0::/job\n", "sys/fs/cgroup/job/memory.events", "oom 0\noom_kill 0\n", "oom 2\noom_kill 1\n"),
        ("4:memory:/job\n", "sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill 4\n", "oom_kill 5\n"),
    ],
)
def test_counter_of_the_cgroup_that_rises_is_evidence(tmp_path, cgroup, counter, before, after):
    kernel = Kernel(tmp_path, cgroup=cgroup)
    kernel.write(counter, before)
    watch = MemoryKillWatch(tmp_path)
    kernel.write(counter, after)
    assert watch.explain(77) == f"likely out of memory: the kernel's oom_kill counter rose ({tmp_path / counter})"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("oom_kill 3\n", "oom_kill 4\n", "likely out of memory"),
        ("oom_kill 3\n", "oom_kill 3\n", "sent by somebody"),
        ("nr_free_pages 5\n", "nr_free_pages 5\n", "if you did not kill it, likely out of memory"),
    ],
)
def test_counter_of_the_machine_is_evidence_where_there_is_one(tmp_path, before, after, words):
    kernel = Kernel(tmp_path, cgroup="")
    kernel.write("proc/vmstat", before)
    watch = MemoryKillWatch(tmp_path)
    kernel.write("proc/vmstat", after)
    assert watch.explain(77).startswith(words)


def test_kernel_log_that_names_the_process_is_quoted(tmp_path):
    kernel = Kernel(tmp_path, cgroup="")
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / "dev/kmsg")
    watch = MemoryKillWatch(tmp_path)
    now_us = int(time.monotonic() * 1e6)
    reader = os.open(tmp_path / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "dev/kmsg", os.O_WRONLY)
    try:
        text = f"3,500,{now_us - 10**7},-;Memory cgroup out of memory: Killed process 77 (python) total-vm:9kB\n"
        os.write(writer, text.encode())
        assert watch.explain(77).startswith("sent by somebody"), "it was before this job"
        os.write(writer, text.replace(str(now_us - 10**7), str(now_us)).encode())
        assert watch.explain(77) == (
            "out of memory: the kernel's log says 'Memory cgroup out of memory: Killed process 77 (python)'"
        )
        kernel.write("proc/vmstat", "oom_kill 3\n")
        assert watch.explain(78).startswith("sent by somebody")
    finally:
        os.close(writer)
        os.close(reader)

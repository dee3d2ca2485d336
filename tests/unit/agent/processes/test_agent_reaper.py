"""Children are collected in the order in which they ended, however late somebody looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]

LATE_LOOK = """
import os, signal, time
from msrun.agent.processes.process_control import process_table
from msrun.agent.processes.reaper import Reaper
reaper = Reaper()
children = []
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    if {watched}:
        reaper.watch(pid)
    children.append(pid)
open_before = len(os.listdir("/proc/self/fd"))
order = [children[place] for place in (4, 1, 5, 0, 3, 2)]
for pid in order:
    os.kill(pid, signal.SIGKILL)
    while process_table()[pid][2] != "Z":
        time.sleep(0.001)
ended = reaper.reap()
assert {{pid for pid, _, _ in ended}} == set(children), ended
assert all(status == signal.SIGKILL and peak > 0 for _, status, peak in ended), ended
print("as they ended" if [pid for pid, _, _ in ended] == order else "other", reaper.reap())
print(open_before - len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize(("watched", "words", "descriptors"), [(True, "as they ended []", 6), (False, "other []", 0)])
def test_children_come_in_the_order_of_their_ends_and_leave_no_descriptor(
    watched: bool, words: str, descriptors: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE_LOOK.format(watched=watched)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [words, str(descriptors)]


NO_DESCRIPTOR_LEFT = """
import os, resource, time
from msrun.agent.processes.reaper import Reaper
reaper = Reaper()
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
pid = os.fork()
if pid == 0:
    os._exit(3)
reaper.watch(pid)
while not (ended := reaper.reap()):
    time.sleep(0.001)
print(os.waitstatus_to_exitcode(ended[0][1]))
"""


def test_child_is_collected_when_there_is_no_descriptor_left_for_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTOR_LEFT], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout) == ("", "3\n")

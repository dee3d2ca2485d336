"""chaos.py MANNER FAMILY: make ready_<rank>, wait for `go` (end with 0) or fail_<rank> (end with 7).

MANNER on TERM: `plain` dies, `tidy` ends with 0 after a moment, `stubborn` ignores it. FAMILY: `alone`, or a child and
a double-forked daemon that are `meek` or `stubborn`; child_<rank> and daemon_<rank> hold their ids.
"""

import os
import signal
import sys
import time
from pathlib import Path


def leave(*_):
    time.sleep(0.05)
    sys.exit(0)


def linger(role):
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
    path = Path(f"{role}_{os.environ['RANK']}")
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    time.sleep(600)
    os._exit(0)


def start_family():
    if os.fork() == 0:
        linger("child")
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            linger("daemon")
        os._exit(0)
    os.waitpid(middle, 0)


if sys.argv[1] == "tidy":
    signal.signal(signal.SIGTERM, leave)
elif sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[2] != "alone":
    start_family()
rank = os.environ["RANK"]
Path(f"ready_{rank}").touch()
while not os.path.exists("go"):
    if os.path.exists(f"fail_{rank}"):
        sys.exit(7)
    time.sleep(0.005)

"""chaos.py MANNER FAMILY: make ready_<rank>, wait for `go` (end with 0) or fail_<rank> (end with 7).

MANNER on TERM: `plain` dies, `tidy` ends with 0 after a moment, `stubborn` ignores it. FAMILY: `alone`, or a child and
a double-forked daemon that are `meek` or `stubborn`.
"""

import os
import signal
import sys
import time
from pathlib import Path


def leave(*_: object) -> None:
    time.sleep(0.05)
    sys.exit(0)


def linger() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[2] == "stubborn" else signal.SIG_DFL)
    time.sleep(600)
    os._exit(0)


def start_family() -> None:
    if os.fork() == 0:
        linger()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            linger()
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

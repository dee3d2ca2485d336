"""leave_children.py wait|exit: leave a child and a double-forked daemon that ignore TERM, then wait or end."""

import os
import signal
import sys
import time
from pathlib import Path


def linger(role: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    Path(f"{role}_{os.environ['RANK']}.tmp").write_text(str(os.getpid()))
    Path(f"{role}_{os.environ['RANK']}.tmp").rename(f"{role}_{os.environ['RANK']}")
    time.sleep(600)
    os._exit(0)


def start_child() -> None:
    if os.fork() == 0:
        linger("child")


def start_daemon() -> None:
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            linger("daemon")
        os._exit(0)
    os.waitpid(middle, 0)


start_child()
start_daemon()
while not all(Path(f"{role}_{os.environ['RANK']}").exists() for role in ("child", "daemon")):
    time.sleep(0.01)
Path(f"ready_{os.environ['RANK']}").touch()
if sys.argv[1] == "wait":
    time.sleep(600)

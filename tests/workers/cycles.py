"""cycles.py ROUND: rank 0 ends its job in one of several ways, by turns; the other ranks wait to be stopped."""

import os
import signal
import sys
import time
from pathlib import Path


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


server = os.getppid()
targets = {0: os.getpid(), 1: parent_of(server), 2: server}
if os.environ["RANK"] == "0":
    way = int(sys.argv[1]) % 5
    if way in targets:
        os.kill(targets[way], signal.SIGTERM if way == 1 else signal.SIGKILL)
    elif way == 3:
        sys.exit(3)
    elif os.fork() != 0:  # a child is left behind
        os._exit(4)
time.sleep(600)

"""Ready as wait.py; on TERM write goodbye_<rank> and end with 0: what a script that saves a checkpoint does."""

import os
import signal
import sys
import time
from pathlib import Path


def leave(*_):
    Path(f"goodbye_{os.environ['RANK']}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600)

"""Say that we are here by making ready_<rank> and wait; `ignore-term` does not go when asked to."""

import os
import signal
import sys
import time
from pathlib import Path

if "ignore-term" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600)

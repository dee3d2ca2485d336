"""Make ready_<rank>, write every USR1, USR2 and WINCH into the log, and end well when the file `end` is there.

A child that lives beside it has no handler: a signal meant for the worker must not reach it.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
for name in ("SIGUSR1", "SIGUSR2", "SIGWINCH"):
    signal.signal(getattr(signal, name), lambda signum, _: print(signal.Signals(signum).name, flush=True))
Path(f"ready_{os.environ['RANK']}").touch()
while not Path("end").exists():
    time.sleep(0.01)
print("child lives" if child.poll() is None else "child died", flush=True)
child.kill()
child.wait()

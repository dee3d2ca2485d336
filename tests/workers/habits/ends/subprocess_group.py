import os
import signal
import subprocess
import sys

child = subprocess.Popen(
    [sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid(), flush=True); import time; time.sleep(60)"],
    start_new_session=True,
    stdout=subprocess.PIPE,
)
print(child.stdout.readline())
os.killpg(child.pid, signal.SIGTERM)
print(child.wait())

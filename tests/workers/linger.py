"""linger.py RANK HOW [STATUS]: the program of rank RANK ends, with exit code STATUS, and its process does not.

HOW: thread (a thread that is no daemon), atexit (a function of atexit), both for as long as the file `go` is missing.
"""

import atexit
import os
import sys
import threading
import time
from pathlib import Path


def upload():
    while not Path("go").exists():
        time.sleep(0.5)  # more often would be a sign of life
    Path("uploaded").touch()


if os.environ["RANK"] == sys.argv[1]:
    if sys.argv[2] == "atexit":
        atexit.register(upload)
    else:
        threading.Thread(target=upload, name="uploader").start()
    sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)

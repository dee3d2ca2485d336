"""Ready as wait.py; on the signal whose name is given, of INT by Python's own exception, say what a script saves.

With `fail` the first attempt fails.
"""

import atexit
import os
import signal
import sys
import time
from pathlib import Path

NAME = sys.argv[1]
if sys.argv[2:] == ["fail"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1)


def interrupt(*_):
    raise KeyboardInterrupt


if NAME != "SIGINT":
    signal.signal(getattr(signal, NAME), interrupt)
atexit.register(print, "atexit", flush=True)
try:
    Path(f"ready_{os.environ['RANK']}").touch()
    time.sleep(600)
except KeyboardInterrupt:
    print(f"saved after {NAME}", flush=True)
finally:
    print("finally", flush=True)

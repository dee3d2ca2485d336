"""cycles_driver.py COUNT SCRIPT: run so many jobs in this one process; print what it holds before and after them."""

import contextlib
import gc
import io
import json
import os
import signal
import sys
from pathlib import Path

import psutil

from msrun.cli import main


def holdings():
    gc.collect()
    me = psutil.Process()
    return {
        "descriptors": sorted(os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()),
        "threads": len(os.listdir("/proc/self/task")),
        "children": [child.status() for child in me.children(recursive=True)],
        "listening": [entry.laddr for entry in me.net_connections() if entry.status == psutil.CONN_LISTEN],
        "temporary": os.listdir(os.environ["TMPDIR"]),
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        "wakeup": signal.set_wakeup_fd(-1),
        "environ": dict(os.environ),
        "directory": os.getcwd(),
    }


def run(number):
    words = ["--worker_num=2", "--quiet", "--grace=5", f"--log_dir=logs_{number % 2}", sys.argv[2], str(number)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            main(words)
    except SystemExit as end:
        return int(end.code or 0)


run(0)  # what is imported and opened once for all is no leak
before = holdings()
codes = [run(number) for number in range(int(sys.argv[1]))]
print(json.dumps({"codes": codes, "before": before, "after": holdings()}))

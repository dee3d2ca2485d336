"""Writes a longer `beats_<rank>` all the time, in a child process too (`beats_<rank>_child`), until `go` is there."""

import os
import subprocess
import sys
import time
from pathlib import Path


def grow(name):
    with Path(name).open("ab", buffering=0) as beats:
        while not Path("go").exists():
            beats.write(b".")
            time.sleep(0.01)


if len(sys.argv) > 1:
    grow(sys.argv[1])
else:
    rank = os.environ["RANK"]
    child = subprocess.Popen([sys.executable, __file__, f"beats_{rank}_child"])
    grow(f"beats_{rank}")
    child.wait()

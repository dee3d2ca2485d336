"""Write 8 MiB of numbered lines, say so by making written_<rank>, and wait."""

import os
import sys
import time
from pathlib import Path

if os.environ["RANK"] == "0":
    sys.stdout.write("".join(f"{number:07d}\n" for number in range(1 << 20)))
    sys.stdout.flush()
Path(f"written_{os.environ['RANK']}").touch()
time.sleep(600)

"""Make ready_<rank>; the last rank ends with 9 when `fail` is there, the others wait to be stopped."""

import os
import sys
import time
from pathlib import Path

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
Path(f"ready_{rank}").touch()
while rank < size - 1 or not Path("fail").exists():
    time.sleep(0.02)
sys.exit(9)

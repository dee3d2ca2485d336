"""Say that we are here by making ready_<rank>, wait for the file `go`, and make done_<rank> at the end."""

import os
import time
from pathlib import Path

rank = os.environ["RANK"]
Path(f"ready_{rank}").touch()
while not Path("go").exists():
    time.sleep(0.01)
Path(f"done_{rank}").touch()

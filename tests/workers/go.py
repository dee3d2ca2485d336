"""go.py [LINES]: write so many lines, say that we are here by making ready_<rank>, wait for the file `go`, make
done_<rank> at the end."""

import os
import sys
import time
from pathlib import Path

rank = os.environ["RANK"]
for count in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
    print(count, "x" * 50)
Path(f"ready_{rank}").touch()
while not Path("go").exists():
    time.sleep(0.01)
Path(f"done_{rank}").touch()

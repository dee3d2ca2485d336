"""Write numbered lines, the first half at once, the rest when `go_on` is there."""

import time
from pathlib import Path

total = 400
for number in range(total // 2):
    print(f"line {number}", flush=True)
while not Path("go_on").exists():
    time.sleep(0.01)
for number in range(total // 2, total):
    print(f"line {number}", flush=True)

"""attempt.py HOW: rank 1 ends as HOW says while the job is in its first attempts, then all ranks end well.

HOW: code=C:N (exit code C in the first N attempts), leave (leaves a process of its own), wait (does not end by itself).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
left = Path("left")
record = {name: os.environ[name] for name in names}
record["left is gone"] = left.exists() and not Path("/proc", left.read_text()).exists()
Path(f"record_{rank}_{attempt}.json").write_text(json.dumps(record))
print(f"rank {rank} in attempt {attempt}", flush=True)

word, _, value = sys.argv[1].partition("=")
first_attempts = int(value.partition(":")[2] or 1)
if attempt < first_attempts:
    if rank != 1 or word == "wait":
        time.sleep(600)
    while not all(Path(f"record_{other}_{attempt}.json").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.01)
    if word == "leave":
        left.write_text(str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))
    sys.exit(int(value.partition(":")[0] or 7))

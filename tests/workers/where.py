"""Write where this worker and a process that it starts run, and with how many threads, into where_<rank>.json."""

import json
import os
import subprocess
import sys
from pathlib import Path

CHILD = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"

if __name__ == "__main__":
    found = {
        "cpus": sorted(os.sched_getaffinity(0)),
        "child_cpus": json.loads(subprocess.run([sys.executable, "-c", CHILD], stdout=subprocess.PIPE).stdout),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    Path(f"where_{os.environ['RANK']}.json").write_text(json.dumps(found))

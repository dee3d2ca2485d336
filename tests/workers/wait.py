"""Say that we are here by making ready_<rank> and wait."""

import os
import time
from pathlib import Path

Path(f"ready_{os.environ['RANK']}").touch()
time.sleep(600)

"""Write 1 MB that cannot be made smaller, then make written_<rank>."""

import os
import sys
from pathlib import Path

sys.stdout.buffer.write(os.urandom(1_000_000))
sys.stdout.buffer.flush()
Path(f"written_{os.environ['RANK']}").touch()

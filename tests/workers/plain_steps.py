"""A loop without the runtime's world that does nothing but report its steps, for so many seconds."""

import sys
import time

from msrun.runtime import report_progress

end = time.monotonic() + float(sys.argv[1])
step = 0
while time.monotonic() < end:
    step += 1
    report_progress(step, 1.0 / step)
    time.sleep(0.05)
assert "torch" not in sys.modules or "--torch" in sys.argv

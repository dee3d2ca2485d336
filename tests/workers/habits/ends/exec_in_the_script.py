import os
import sys

print("before")
sys.stdout.flush()
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('after', sys.argv)", "x"])

import subprocess
import sys

code = "import sys; print(sys.argv, sys.flags.isolated, sys.stdin.read(), 'torch' in sys.modules)"
print(subprocess.run([sys.executable, "-c", code, "x"], input="in", capture_output=True, text=True))

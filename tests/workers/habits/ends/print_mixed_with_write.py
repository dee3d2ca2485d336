import os
import subprocess
import sys

print("one", end=" ")
os.write(1, b"two\n")
sys.stdout.buffer.write(b"three\n")
os.write(2, b"four\n")
subprocess.run(["sh", "-c", "echo five; echo six >&2"])
sys.stderr.write("seven")
os.write(1, b" eight\n")

import os
import subprocess
import sys

print("one")
os.write(1, b"two\n")
print("three", file=sys.stderr)
subprocess.run(["sh", "-c", "echo four; echo five >&2"])
sys.stdout.write("six\n")
os.write(2, b"seven\n")
print("eight", flush=True, end="")
os.write(1, b" nine\n")

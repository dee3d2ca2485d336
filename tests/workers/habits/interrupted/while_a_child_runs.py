import os
import subprocess
import sys

CHILD = """
import os, time
try:
    open(os.environ["READY"], "w").close()
    for _ in range(6000): time.sleep(0.01)
except KeyboardInterrupt:
    print("the child has it, too", flush=True)
"""
try:
    subprocess.run([sys.executable, "-c", CHILD], env={**os.environ, "READY": os.path.abspath("ready")})
except KeyboardInterrupt:
    print("the parent has it")

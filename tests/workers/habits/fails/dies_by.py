import os
import signal
import sys

print("line")
os.kill(os.getpid(), getattr(signal, sys.argv[1]))

import atexit
import sys

atexit.register(print, "after it")
atexit.register(sys.exit, 5)

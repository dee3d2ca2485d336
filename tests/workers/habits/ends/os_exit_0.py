import atexit
import os

atexit.register(print, "never")
print("line")
os._exit(0)

import atexit
import os
import sys

atexit.register(lambda: print("at exit of", who))
who = "parent"
pid = os.fork()
if pid == 0:
    who = "child"
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

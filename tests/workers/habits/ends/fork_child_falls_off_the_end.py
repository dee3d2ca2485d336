import os

pid = os.fork()
if pid:
    os.waitpid(pid, 0)
print("both come here" if pid else "child first")

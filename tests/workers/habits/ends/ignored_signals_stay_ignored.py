import os
import signal

for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    signal.signal(signum, signal.SIG_IGN)
    os.kill(os.getpid(), signum)
print("alive")

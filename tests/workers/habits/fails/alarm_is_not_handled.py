import signal
import time

signal.setitimer(signal.ITIMER_REAL, 0.05)
time.sleep(30)

import signal
import time

came: list[int] = []
signal.signal(signal.SIGINT, lambda signum, frame: came.append(signum))
with open("ready", "w"):
    pass
while not came:
    time.sleep(0.01)
print("handled", came[0], "at the end of a step")

import faulthandler
import os
import time

with open("stacks.txt", "w") as file:
    faulthandler.dump_traceback_later(0.05, file=file)
    time.sleep(0.3)
    faulthandler.cancel_dump_traceback_later()
with open("stacks.txt") as file:
    print("Timeout" in file.read())
os.remove("stacks.txt")

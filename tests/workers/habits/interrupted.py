"""Programs that get a Ctrl-C, a cell each."""

# %% caught
import time

try:
    with open("ready", "w"):
        pass
    for _ in range(6000):
        time.sleep(0.01)
except KeyboardInterrupt:
    print("caught")
    with open("saved", "w") as file:
        file.write("step 7")
print("goes on")

# %% not_caught
import atexit
import time


class Writer:
    def __del__(self):
        print("finalizer")


writer = Writer()
atexit.register(print, "atexit")


def train():
    try:
        with open("ready", "w"):
            pass
        [time.sleep(0.01) for _ in range(6000)]
    finally:
        print("finally")


train()

# %% of_asyncio
import asyncio
import contextlib


async def main():
    try:
        with open("ready", "w"):
            pass
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled")
        raise


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
print("after the loop")

# %% while_a_child_runs
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

# %% while_a_thread_runs
import threading
import time

is_over = threading.Event()


def work():
    is_over.wait(60)
    print("the thread ends")


threading.Thread(target=work).start()
try:
    with open("ready", "w"):
        pass
    for _ in range(6000):
        time.sleep(0.01)
except KeyboardInterrupt:
    print("the main thread has it")
    is_over.set()

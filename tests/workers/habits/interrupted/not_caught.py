import atexit
import time


class Writer:
    def __del__(self) -> None:
        print("finalizer")


writer = Writer()
atexit.register(print, "atexit")


def train() -> None:
    try:
        with open("ready", "w"):
            pass
        for _ in range(6000):
            time.sleep(0.01)
    finally:
        print("finally")


train()

"""What runs after the last line: atexit handlers, threads that are no daemons, finalizers, files left open."""

import atexit
import threading
import time
import weakref


class Thing:
    pass


def finish_late() -> None:
    threading.Event().wait(0.05)
    print("thread done", flush=True)


thing = Thing()
weakref.finalize(thing, print, "finalizer ran", flush=True)
atexit.register(print, "atexit ran", flush=True)
threading.Thread(target=finish_late).start()
file = open("left_open.txt", "w")  # noqa: SIM115 - left to the interpreter on purpose
file.write("written at the end")
print("last line", time.monotonic() > 0)

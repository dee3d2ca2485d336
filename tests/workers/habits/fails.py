"""Programs that fail, a cell each."""

# %% descriptor_1_is_closed
import os

os.close(1)
print("x")

# %% dies_by
import os
import signal
import sys

print("line")
os.kill(os.getpid(), getattr(signal, sys.argv[1]))

# %% error_then_atexit_and_finalizer
import atexit


class Held:
    def __del__(self):
        print("finalizer")


held = Held()
atexit.register(print, "at exit")
raise ValueError("x")

# %% excepthook
import sys

sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_lineno, trace.tb_next)
raise ValueError("x")

# %% excepthook_exits
import sys

sys.excepthook = lambda *_: sys.exit(6)
raise ValueError("the first")

# %% excepthook_is_gone
import sys

del sys.excepthook
raise ValueError("x")

# %% excepthook_raises
import sys


def hook(*_):
    raise KeyError("in the hook")


sys.excepthook = hook
raise ValueError("the first")

# %% keyboard_interrupt
import atexit
import os
import signal
import time

atexit.register(print, "at exit")
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
finally:
    print("finally")

# %% keyboard_interrupt_in_atexit
import atexit
import signal

atexit.register(print, "after it")
atexit.register(signal.raise_signal, signal.SIGINT)
raise SystemExit(2)

# %% keyboard_interrupt_while_threads_are_joined
import atexit
import os
import signal
import threading
import time


def work():
    threading.main_thread().join()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    print("thread ends")


atexit.register(print, "at exit")
threading.Thread(target=work).start()
raise SystemExit(3)

# %% last_error_at_exit
import atexit
import sys

atexit.register(lambda: print(sys.last_type.__name__, sys.last_value, sys.exc_info()[0]))
raise ValueError("x")

# %% stdout_cannot_be_flushed
import os
import sys

reader, writer = os.pipe()
os.close(reader)
sys.stdout = open(writer, "w")  # noqa: SIM115
print("lost")


# %% text_is_the_status
raise SystemExit("what went wrong ☃")


# %% uncaught_error
def inner(value):
    return 1 / value


def outer():
    try:
        {}["key"]
    except KeyError:
        inner(0)


print("begin")
outer()

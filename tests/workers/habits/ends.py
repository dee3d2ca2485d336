"""Programs that end well, a cell each."""

# %% atexit_exits
import atexit
import sys

atexit.register(print, "after it")
atexit.register(sys.exit, 5)

# %% atexit_sees_globals
import atexit

RESULTS = {"loss": 0.5}


@atexit.register
def save():
    with open("results.txt", "w") as file:
        file.write(f"{RESULTS} {__name__}")


# %% atexit_sees_the_threads
import atexit
import threading

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))

# %% daemon_thread_prints_on
import threading

begun = threading.Event()


def work():
    while True:
        begun.set()
        try:
            len(str(threading.current_thread()))
        except BaseException as error:
            print("daemon thread:", type(error).__name__)
            raise


threading.Thread(target=work, daemon=True).start()
begun.wait()

# %% file_held_by_a_module_is_written
import json

json.kept_open = open("kept.txt", "w")  # noqa: SIM115
json.kept_open.write("held by the standard library")

# %% file_left_open_is_written
import gzip

plain = open("plain.txt", "w")  # noqa: SIM115
plain.write("never closed")
packed = gzip.GzipFile("packed.gz", "wb", mtime=0)
packed.write(b"never closed")


# %% finalizer_in_a_cycle
class Node:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("collected", Node.__name__)


node = Node()


# %% finalizer_of_an_imported_module_writes
import os
import sys

with open("holder.py", "w") as file:
    file.write(
        "import json\nclass Held:\n  def __del__(self): print(json.dumps([1]), NAME)\nNAME = 'x'\nheld = Held()\n"
    )
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
import holder  # noqa: E402

print(holder.NAME)


# %% finalizer_order
class Named:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("gone", self.name)


first = Named("first")
_private = Named("private")
second = Named("second")
third = Named("third")
print("end of main")


# %% fork_in_the_script
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

# %% main_is_replaced
import sys
import types

sys.modules["__main__"] = types.ModuleType("__main__")
import __main__  # noqa: E402

print(hasattr(__main__, "sys"))

# %% modules_are_emptied
import sys

sys.modules.clear()

# %% pickle_of_main
import copy
import dataclasses
import pickle
import typing


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: "int" = 2


class Row(typing.NamedTuple):
    x: int


def function():
    return 1


data = pickle.dumps([Point(1), Row(2), function])
assert b"__main__" in data
print(pickle.loads(data)[:2], pickle.loads(data)[2](), copy.deepcopy(Point(3)))
print(typing.get_type_hints(Point), Point.__module__, Point.__qualname__)

# %% print_lines_mixed_with_write
import os
import subprocess
import sys

print("one")
os.write(1, b"two\n")
print("three", file=sys.stderr)
subprocess.run(["sh", "-c", "echo four; echo five >&2"])
sys.stdout.write("six\n")
os.write(2, b"seven\n")
print("eight", flush=True, end="")
os.write(1, b" nine\n")

# %% print_mixed_with_write
import os
import subprocess
import sys

print("one", end=" ")
os.write(1, b"two\n")
sys.stdout.buffer.write(b"three\n")
os.write(2, b"four\n")
subprocess.run(["sh", "-c", "echo five; echo six >&2"])
sys.stderr.write("seven")
os.write(1, b" eight\n")

# %% standard_module_is_shadowed
import os
import sys

with open("fractions.py", "w") as file:
    file.write("MINE = True\n")
with open("dataclasses.py", "w") as file:
    file.write("MINE = True\n")
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
import dataclasses  # noqa: E402
import fractions  # noqa: E402

print(hasattr(fractions, "MINE"), hasattr(dataclasses, "MINE"))

# %% stdout_is_a_tee
import sys


class Tee:
    def __init__(self, stream, file):
        self.stream, self.file = stream, file

    def write(self, text):
        self.file.write(text)
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()
        self.file.flush()


sys.stdout = Tee(sys.stdout, open("tee.txt", "w"))  # noqa: SIM115
print("to both")

# %% stdout_is_closed_by_the_script
import sys

print("before")
sys.stdout.close()

# %% thread_goes_on_after_main
import threading
import time


def work():
    threading.main_thread().join()
    time.sleep(0.1)
    print("thread ends", threading.main_thread().is_alive())


threading.Thread(target=work).start()
print("main ends")

# %% threading_atexit
import atexit
import threading

atexit.register(print, "atexit")
threading._register_atexit(print, "before threads are joined")

# %% trace_until_the_end
import sys

names = set()
sys.setprofile(lambda frame, event, arg: names.add(frame.f_code.co_name))


class Late:
    def __del__(self):
        print("run_main" in names, "_run_script" in names)


late = Late()

# %% traceback_is_printed
import traceback
import warnings


def inner():
    raise KeyError("x")


try:
    inner()
except KeyError:
    traceback.print_exc()
traceback.print_stack()
warnings.warn("of main", stacklevel=1)
warnings.warn("of main's caller", stacklevel=2)
warnings.warn("of nobody", stacklevel=99)

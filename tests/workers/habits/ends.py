"""Programs that end well, a cell each."""

# %% atexit_exits
import atexit
import sys

atexit.register(print, "after it")
atexit.register(sys.exit, 5)

# %% atexit_order
import atexit

for number in range(3):
    atexit.register(print, "at exit", number)
atexit.register(lambda: atexit.register(print, "registered by one at exit"))
unwanted = atexit.register(print, "never")
atexit.unregister(print)
atexit.register(print, "kept")

# %% atexit_raises
import atexit

atexit.register(print, "after it")
atexit.register(lambda: 1 / 0)

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

# %% breakpoint_hook
import os

os.environ["PYTHONBREAKPOINT"] = "builtins.print"
breakpoint("called")

# %% daemon_thread_is_dropped
import threading
import time

begun = threading.Event()


def work():
    begun.set()
    try:
        time.sleep(60)
    finally:
        print("never")


threading.Thread(target=work, daemon=True).start()
begun.wait()

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

# %% descriptor_1_is_redirected
import os

print("to the log")
saved = os.dup(1)
file = os.open("file.txt", os.O_WRONLY | os.O_CREAT)
os.dup2(file, 1)
print("to the file")
os.dup2(saved, 1)
print("to the log again")

# %% environment_passes_on
import os
import subprocess

os.environ["ONE"] = "1"
os.putenv("TWO", "2")
os.environ.setdefault("THREE", "3")
os.unsetenv("HOME")
for line in ("FOUR=4", "export FIVE=5"):
    name, _, value = line.removeprefix("export ").partition("=")
    os.environ[name] = value
subprocess.run(["sh", "-c", "echo $ONE $TWO $THREE $FOUR $FIVE home=$HOME"])

# %% exec_of_itself
import os
import sys

if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    print("first")
    os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])
print("second")

# %% exit_builtin
print(exit, quit)
exit()

# %% faulthandler_dump
import faulthandler


def inner():
    faulthandler.dump_traceback(all_threads=False)


inner()

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


# %% finalizer_of_a_global_writes
import json


class Results:
    def __init__(self):
        self.rows = [1, 2]
        self.file = open("rows.json", "w")  # noqa: SIM115

    def __del__(self):
        json.dump([self.rows, __name__], self.file)


results = Results()

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


# %% fork_child_raises
import os

pid = os.fork()
if not pid:
    raise ValueError("in the child")
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

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

# %% future_annotations
from __future__ import annotations


def function(x): ...  # noqa: F821


print(function.__annotations__)

# %% garbage_is_counted
import gc

gc.collect()


class Node:
    def __init__(self):
        self.me = self


nodes = [Node() for _ in range(10)]
del nodes
print(gc.collect(), gc.isenabled(), gc.get_threshold())


# %% ignored_signals_stay_ignored
import os
import signal

for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    signal.signal(signum, signal.SIG_IGN)
    os.kill(os.getpid(), signum)
print("alive")

# %% keyboard_interrupt_is_caught
import os
import signal
import time

try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
except KeyboardInterrupt:
    print("saved")

# %% loader_reads_the_source
print(__loader__.get_source("__main__")[:5], __loader__.is_package("__main__"))

# %% logging_is_flushed
import logging
import logging.handlers

handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler("log.txt", delay=True))
logging.getLogger().addHandler(handler)
logging.getLogger("train").warning("kept until shutdown")

# %% logging_last_resort
import logging

logging.warning("to stderr")
logging.getLogger("x").info("not shown")
logging.getLogger("x").error("%s and %d", "a", "no number")

# %% main_is_removed
import sys

del sys.modules["__main__"]
print("gone")

# %% main_is_replaced
import sys
import types

sys.modules["__main__"] = types.ModuleType("__main__")
import __main__  # noqa: E402

print(hasattr(__main__, "sys"))

# %% modules_are_emptied
import sys

sys.modules.clear()

# %% not_utf8_is_printed
import os
import sys

os.write(1, b"bytes \xff\n")
print("surrogate", os.fsdecode(b"\xff"))
print("snowman ☃", file=sys.stderr)
print("surrogate", os.fsdecode(b"\xff"), file=sys.stderr)

# %% os_exit_0
import atexit
import os

atexit.register(print, "never")
print("line")
os._exit(0)

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

# %% pool_of_threads_ends_its_work
import time
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(2)
pool.submit(lambda: (time.sleep(0.1), print("work is done")))
print("main ends")

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

# %% print_without_newline
import sys

print("no newline", end="")
sys.stderr.write("nor here")

# %% runpy_runs_another
import runpy
import sys

with open("other.py", "w") as file:
    file.write(
        "import sys\nprint(__name__, __file__, sys.argv[0] == __file__, vars(sys.modules['__main__']) is globals())\n"
    )
runpy.run_path("other.py", run_name="__main__")
print(runpy.run_module("keyword")["__name__"], sys.modules["__main__"].__dict__ is globals())

# %% script_deletes_itself
import os

os.remove(__file__)
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
print("in no folder")

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

# %% stderr_is_none
import sys

sys.stderr = None
print("fine")

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

# %% stdout_is_none
import sys

print("before")
sys.stdout = None
print("nowhere")

# %% temporary_folder_is_removed
import os
import tempfile

folder = tempfile.TemporaryDirectory(dir=".", prefix="kept")
named = tempfile.NamedTemporaryFile(dir=".", prefix="named")  # noqa: SIM115
print(len(os.listdir(".")))

# %% thread_goes_on_after_main
import threading
import time


def work():
    threading.main_thread().join()
    time.sleep(0.1)
    print("thread ends", threading.main_thread().is_alive())


threading.Thread(target=work).start()
print("main ends")

# %% thread_raises
import threading


def fail():
    raise ValueError("in a thread")


thread = threading.Thread(target=fail, name="failing")
thread.start()
thread.join()

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

# %% unraisablehook
import sys


class Raises:
    def __del__(self):
        raise ValueError("in a finalizer")


sys.unraisablehook = lambda args: print("hook:", args.exc_value, args.err_msg)
raises = Raises()
del raises

# %% weakref_finalize
import weakref


class Held:
    pass


held, other = Held(), Held()
weakref.finalize(held, print, "finalize held")
weakref.finalize(other, print, "finalize other").atexit = False

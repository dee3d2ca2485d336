"""Programs that start processes, a cell each."""

# %% child_runs_no_atexit_of_the_parent
import atexit
import multiprocessing


def work():
    print("child", flush=True)


atexit.register(print, "at exit")
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()

# %% daemonic_process_is_ended
import multiprocessing
import time


def forever():
    time.sleep(1000)


if __name__ == "__main__":
    child = multiprocessing.Process(target=forever, daemon=True)
    child.start()
    print(child.is_alive())

# %% executor_of_processes
from concurrent.futures import ProcessPoolExecutor


def double(x):
    return 2 * x


def fail():
    raise ValueError("in a child")


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(double, range(3))))
        print(pool.submit(fail).exception())

# %% pool
import multiprocessing
import os
import sys


class Square:
    """Of __main__, found again by its name."""

    def __init__(self, power):
        self.power = power

    def __call__(self, x):
        return x**self.power


def describe(x):
    return describe.__module__, multiprocessing.current_process().name[:4], "RANK" in os.environ


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        print(pool.map(Square(3), range(4)))
        print(pool.apply(describe, (1,))[0])

# %% pool_is_left_open
import multiprocessing


def double(x):
    return 2 * x


if __name__ == "__main__":
    pool = multiprocessing.Pool(2)
    print(pool.map(double, [1, 2]))

# %% process
import multiprocessing
import sys


class Message:
    def __init__(self, text):
        self.text = text


def work(queue, event):
    event.wait()
    queue.put(Message("from " + multiprocessing.current_process().name))
    sys.exit(4)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue, event = context.Queue(), context.Event()
    child = context.Process(target=work, args=(queue, event), name="one")
    child.start()
    event.set()
    print(queue.get().text)
    child.join()
    print(child.exitcode)

# %% process_is_joined_at_the_end
import multiprocessing
import time


def work():
    time.sleep(0.2)
    with open("done.txt", "w") as file:
        file.write("done")


if __name__ == "__main__":
    multiprocessing.Process(target=work).start()
    print("main ends")

# %% shared_dictionary
import multiprocessing


def add(found, key):
    found[key] = len(key)


if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        found = manager.dict()
        child = multiprocessing.Process(target=add, args=(found, "key"))
        child.start()
        child.join()
        print(dict(found))

# %% spawn_without_a_guard
import multiprocessing


def work():
    print("never")


child = multiprocessing.get_context("spawn").Process(target=work)
child.start()
child.join()
print(child.exitcode)

# %% start_method_is_set
import multiprocessing


def work(value):
    value.value = 7


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    value = multiprocessing.Value("i", 0)
    child = multiprocessing.Process(target=work, args=(value,))
    child.start()
    child.join()
    print(value.value, multiprocessing.get_start_method())

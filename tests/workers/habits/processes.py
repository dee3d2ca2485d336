"""Programs that start processes, a cell each."""

# %% daemonic_process_is_ended
import multiprocessing
import time


def forever():
    time.sleep(1000)


if __name__ == "__main__":
    child = multiprocessing.Process(target=forever, daemon=True)
    child.start()
    print(child.is_alive())

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

"""A spawn pool over a function of this very script, with a shared queue of the standard library."""

import multiprocessing


def double(number: int) -> int:
    return 2 * number


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2, 3]))

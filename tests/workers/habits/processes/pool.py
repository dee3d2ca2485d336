import multiprocessing
import os
import sys


class Square:
    """Of __main__, found again by its name."""

    def __init__(self, power: int) -> None:
        self.power = power

    def __call__(self, x: int) -> int:
        return x**self.power


def describe(x: int) -> tuple[str, str, bool]:
    return describe.__module__, multiprocessing.current_process().name[:4], "RANK" in os.environ


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with context.Pool(2) as pool:
        print(pool.map(Square(3), range(4)))
        print(pool.apply(describe, (1,))[0])

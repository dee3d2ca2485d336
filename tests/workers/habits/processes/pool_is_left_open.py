import multiprocessing


def double(x: int) -> int:
    return 2 * x


if __name__ == "__main__":
    pool = multiprocessing.Pool(2)
    print(pool.map(double, [1, 2]))

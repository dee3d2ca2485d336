from concurrent.futures import ProcessPoolExecutor


def double(x: int) -> int:
    return 2 * x


if __name__ == "__main__":
    pool = ProcessPoolExecutor(1)
    print(pool.submit(double, 2).result())

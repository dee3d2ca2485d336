from concurrent.futures import ProcessPoolExecutor


def double(x: int) -> int:
    return 2 * x


def fail() -> None:
    raise ValueError("in a child")


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        print(list(pool.map(double, range(3))))
        print(pool.submit(fail).exception())

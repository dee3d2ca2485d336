import multiprocessing


def add(found, key: str) -> None:
    found[key] = len(key)


if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        found = manager.dict()
        child = multiprocessing.Process(target=add, args=(found, "key"))
        child.start()
        child.join()
        print(dict(found))

import multiprocessing
import time


def forever() -> None:
    time.sleep(1000)


if __name__ == "__main__":
    child = multiprocessing.Process(target=forever, daemon=True)
    child.start()
    print(child.is_alive())

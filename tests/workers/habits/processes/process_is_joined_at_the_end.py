import multiprocessing
import time


def work() -> None:
    time.sleep(0.2)
    with open("done.txt", "w") as file:
        file.write("done")


if __name__ == "__main__":
    multiprocessing.Process(target=work).start()
    print("main ends")

import atexit
import multiprocessing


def work() -> None:
    print("child", flush=True)


atexit.register(print, "at exit")
if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()

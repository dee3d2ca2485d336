import atexit
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)
pool.submit(print, "before").result()


@atexit.register
def late() -> None:
    try:
        pool.submit(print, "late")
    except RuntimeError as error:
        print(error)

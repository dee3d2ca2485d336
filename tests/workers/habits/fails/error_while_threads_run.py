import threading
import time


def work() -> None:
    threading.main_thread().join()
    time.sleep(0.1)
    print("thread ends")


threading.Thread(target=work).start()
raise ValueError("x")

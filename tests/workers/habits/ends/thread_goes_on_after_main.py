import threading
import time


def work() -> None:
    threading.main_thread().join()
    time.sleep(0.1)
    print("thread ends", threading.main_thread().is_alive())


threading.Thread(target=work).start()
print("main ends")

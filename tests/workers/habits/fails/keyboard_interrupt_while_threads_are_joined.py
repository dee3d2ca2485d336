import atexit
import os
import signal
import threading
import time


def work() -> None:
    threading.main_thread().join()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.5)
    print("thread ends")


atexit.register(print, "at exit")
threading.Thread(target=work).start()
raise SystemExit(3)

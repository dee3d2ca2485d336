import threading
import time

is_over = threading.Event()


def work() -> None:
    with open("ready", "w"):
        pass
    is_over.wait(60)
    print("the thread ends")


threading.Thread(target=work).start()
try:
    for _ in range(6000):
        time.sleep(0.01)
except KeyboardInterrupt:
    print("the main thread has it")
    is_over.set()

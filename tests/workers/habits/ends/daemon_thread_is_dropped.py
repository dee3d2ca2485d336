import threading
import time

begun = threading.Event()


def work() -> None:
    begun.set()
    try:
        time.sleep(60)
    finally:
        print("never")


threading.Thread(target=work, daemon=True).start()
begun.wait()

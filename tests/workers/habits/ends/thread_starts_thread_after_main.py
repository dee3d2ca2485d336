import threading


def last() -> None:
    print("last")


def work() -> None:
    threading.main_thread().join()
    threading.Thread(target=last).start()


threading.Thread(target=work).start()

import threading

begun = threading.Event()


def work() -> None:
    while True:
        begun.set()
        try:
            len(str(threading.current_thread()))
        except BaseException as error:
            print("daemon thread:", type(error).__name__)
            raise


threading.Thread(target=work, daemon=True).start()
begun.wait()

import contextlib


@contextlib.contextmanager
def opened():
    try:
        yield
    finally:
        print("left")


manager = opened()
manager.__enter__()

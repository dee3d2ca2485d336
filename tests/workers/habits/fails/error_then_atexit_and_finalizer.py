import atexit


class Held:
    def __del__(self) -> None:
        print("finalizer")


held = Held()
atexit.register(print, "at exit")
raise ValueError("x")

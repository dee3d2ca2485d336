class Held:
    def __del__(self) -> None:
        print("finalizer", __name__)


def fail() -> None:
    held = Held()
    raise ValueError(held.__class__.__name__)


fail()

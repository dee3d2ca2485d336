class Held:
    def __del__(self) -> None:
        print("held is gone")


class Holder:
    held = Held()


def function(default: Held = Held()) -> None:  # noqa: B008
    pass

class Raises:
    def __del__(self) -> None:
        raise ValueError("in a finalizer")


raises = Raises()
del raises
print("main goes on")

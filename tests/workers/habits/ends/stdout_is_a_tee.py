import sys


class Tee:
    def __init__(self, stream, file) -> None:
        self.stream, self.file = stream, file

    def write(self, text: str) -> int:
        self.file.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()
        self.file.flush()


sys.stdout = Tee(sys.stdout, open("tee.txt", "w"))  # noqa: SIM115
print("to both")

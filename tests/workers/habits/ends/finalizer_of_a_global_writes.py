import json


class Results:
    def __init__(self) -> None:
        self.rows = [1, 2]
        self.file = open("rows.json", "w")  # noqa: SIM115

    def __del__(self) -> None:
        json.dump([self.rows, __name__], self.file)


results = Results()

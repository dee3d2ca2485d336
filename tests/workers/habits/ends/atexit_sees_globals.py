import atexit

RESULTS = {"loss": 0.5}


@atexit.register
def save() -> None:
    with open("results.txt", "w") as file:
        file.write(f"{RESULTS} {__name__}")

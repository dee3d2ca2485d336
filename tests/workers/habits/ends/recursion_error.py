import traceback


def deeper() -> None:
    deeper()


try:
    deeper()
except RecursionError as error:
    print(error, len(traceback.extract_tb(error.__traceback__)) > 900)

import sys


def hook(*_: object) -> None:
    raise KeyError("in the hook")


sys.excepthook = hook
raise ValueError("the first")

import sys

sys.excepthook = lambda *_: sys.exit(6)
raise ValueError("the first")

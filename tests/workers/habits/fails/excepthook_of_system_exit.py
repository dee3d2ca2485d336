import sys

sys.excepthook = lambda *_: print("never")
sys.exit(4)

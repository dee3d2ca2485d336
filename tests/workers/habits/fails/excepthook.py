import sys

sys.excepthook = lambda kind, error, trace: print("hook:", kind.__name__, error, trace.tb_lineno, trace.tb_next)
raise ValueError("x")

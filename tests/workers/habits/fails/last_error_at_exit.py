import atexit
import sys

atexit.register(lambda: print(sys.last_type.__name__, sys.last_value, sys.exc_info()[0]))
raise ValueError("x")

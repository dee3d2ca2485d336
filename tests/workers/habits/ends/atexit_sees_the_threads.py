import atexit
import threading

atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))

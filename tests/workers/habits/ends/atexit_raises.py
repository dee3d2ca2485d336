import atexit

atexit.register(print, "after it")
atexit.register(lambda: 1 / 0)

import atexit

for number in range(3):
    atexit.register(print, "at exit", number)
atexit.register(lambda: atexit.register(print, "registered by one at exit"))
unwanted = atexit.register(print, "never")
atexit.unregister(print)
atexit.register(print, "kept")

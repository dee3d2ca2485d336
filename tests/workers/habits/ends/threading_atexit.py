import atexit
import threading

atexit.register(print, "atexit")
threading._register_atexit(print, "before threads are joined")

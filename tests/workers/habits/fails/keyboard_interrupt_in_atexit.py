import atexit
import signal

atexit.register(print, "after it")
atexit.register(signal.raise_signal, signal.SIGINT)
raise SystemExit(2)

import os
import signal

reader, writer = os.pipe2(os.O_NONBLOCK)
signal.set_wakeup_fd(writer)
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
print(os.read(reader, 10) == bytes([signal.SIGUSR1]))

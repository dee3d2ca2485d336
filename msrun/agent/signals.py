"""Signals to the launcher as readable bytes, so that one selector waits for everything."""

from __future__ import annotations

import os
import signal
import threading

HELD = (signal.SIGUSR1, signal.SIGUSR2)


def hold_signals() -> None:
    """Keep what a batch system may send at any moment for the first SignalPipe; without it, it ends this process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)


class SignalPipe:
    """INT, TERM, HUP, QUIT, signals to be passed on and ALRM as bytes; a HUP ignored at start (nohup) stays so."""

    def __init__(
        self, forward: tuple[int, ...] = (), *, ignore_afterwards: bool = False, time_limit_s: float = 0.0
    ) -> None:
        """`ignore_afterwards`: leave them ignored at the end. `time_limit_s`: when ALRM comes, once; 0 = never."""
        self._ignore_afterwards = ignore_afterwards
        self.time_limit_s = time_limit_s
        forward = (*forward, signal.SIGALRM) if time_limit_s else forward
        self._lock = threading.Lock()
        self._wanted = dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, *forward))

    def __enter__(self) -> SignalPipe:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._old = {}
        for signum in self._wanted:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._old[signum] = signal.signal(signum, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)  # what is not wanted does what it does to any process
        if self.time_limit_s:
            signal.setitimer(signal.ITIMER_REAL, self.time_limit_s)
        return self

    def __exit__(self, *_: object) -> None:
        if self.time_limit_s:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        for signum, handler in self._old.items():
            signal.signal(signum, signal.SIG_IGN if self._ignore_afterwards else handler)
        signal.set_wakeup_fd(self._old_wakeup)
        with self._lock:
            os.close(self._reader)
            os.close(self._writer)
            self._writer = -1

    def fileno(self) -> int:
        return self._reader

    def tell(self, signum: int) -> None:
        """Have a signal read here that this process does not get, and so cannot ignore. For any thread."""
        with self._lock:
            if self._writer >= 0:
                os.write(self._writer, bytes([signum]))

    def read(self) -> list[int]:
        try:
            return [signum for signum in os.read(self._reader, 256) if signum in self._wanted]
        except BlockingIOError:
            return []


def stop_this_process() -> None:
    """Stop as Ctrl-Z wants; returns when somebody continues it."""
    os.kill(os.getpid(), signal.SIGSTOP)

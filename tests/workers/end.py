"""end.py RANK HOW: rank RANK ends as HOW says, all others wait to be stopped (`all` means every rank).

HOW: an exit code, a signal's name, raise, interrupt, os_exit=N.
"""

import os
import signal
import sys
import time


def end(how):
    word, _, value = how.partition("=")
    if word.isdigit():
        sys.exit(int(word))
    if word.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, word))
        time.sleep(600)
    if word == "raise":
        raise RuntimeError("the loss is gone")
    if word == "interrupt":
        raise KeyboardInterrupt
    if word == "os_exit":
        os._exit(int(value))


if __name__ == "__main__":
    print(f"rank {os.environ['RANK']} begins", flush=True)
    if sys.argv[1] in ("all", os.environ["RANK"]):
        end(sys.argv[2])
    else:
        time.sleep(600)

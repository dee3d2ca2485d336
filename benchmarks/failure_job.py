"""The jobs that `failure.py` measures. The same file runs under msrun, torchrun, mpirun and a plain shell.

    failure_job.py FOLDER fail HOW        one rank ends with 3 when told to; the others end on TERM as HOW says
    failure_job.py FOLDER idle            every rank sleeps
    failure_job.py FOLDER write LINES HOW every rank prints so many lines when told to; `each` writes each at once

Every rank says that it is there by FOLDER/rank_<rank>, which holds its process id; FOLDER/go tells the ranks to begin.
"""

import os
import signal
import sys
import time
from pathlib import Path

IDLE_S = 3600.0
LOOK_S = 0.002
EXIT_CODE = 3


def line(rank: int, number: int) -> str:
    """Return one line of output, as long as a training script's."""
    return f"rank {rank} step {number} loss {number % 9973 / 9973:.6f}"


def announce(folder: Path, rank: int) -> None:
    """Make this rank's file, whole from its first moment."""
    unfinished = folder / f".rank_{rank}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / f"rank_{rank}")


def wait_for_go(folder: Path) -> None:
    """Wait until the benchmark wants it to begin."""
    go = str(folder / "go")
    while not os.path.exists(go):
        time.sleep(LOOK_S)


def fail(folder: Path, rank: int, how: str) -> None:
    """Rank 1 ends without a word; the others wait for TERM."""
    if how == "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    announce(folder, rank)
    if rank != 1:
        time.sleep(IDLE_S)
    wait_for_go(folder)
    (folder / "exit").write_text(repr(time.monotonic()))
    os._exit(EXIT_CODE)


def main() -> None:
    """Do what the arguments say."""
    folder, part = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
    if part == "fail":
        fail(folder, rank, sys.argv[3])
    announce(folder, rank)
    if part == "idle":
        time.sleep(IDLE_S)
    wait_for_go(folder)
    with open(1, "w", buffering=1, closefd=False) as each:
        stream = each if sys.argv[4] == "each" else sys.stdout
        for number in range(int(sys.argv[3])):
            print(line(rank, number), file=stream)


if __name__ == "__main__":
    main()

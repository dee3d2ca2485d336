"""Runs work in forked processes: every rank of a case, and the one process that it is compared with.

A rank that fails, dies or waits for ever takes its world with it and nothing else: the next case forks a new one. This
process must have no threads: nothing here runs a backward pass or joins a world.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from job_runner import WORKER_IMPORTS

from msrun.errors import MsrunError
from msrun.runtime import init
from random_networks.case import Case
from random_networks.training import train_alone, train_rank

POLL_S = 0.02
IDLE_S = 12.0
"""A world none of whose processes has run for so long hangs."""
BUSY = 0.02
"""Share of the looks at which a process that works is seen running, also on a busy machine."""
DEADLINE_S = 180.0


@dataclass
class Report:
    """How one process has ended."""

    kind: str
    """done, refused, error, died or hung"""
    trained: Any = None
    """What the work returned: `Trained` of a case."""
    error: str = ""
    """Type and message."""
    message: str = ""
    trace: str = ""
    at_s: float = 0.0
    """When, on this machine's clock."""


def run_case(case: Case) -> tuple[Report, list[Report]]:
    """Return the reports of the one process and of every rank."""
    folder = Path(tempfile.mkdtemp(prefix="case-"))
    try:
        alone = fork_process(folder / "alone", {}, lambda: train_alone(case))
        ranks = fork_ranks(folder, case.world_size, lambda: train_rank(case, folder))
        reports = wait_for([alone], [folder / "alone"])
        return reports[0], wait_for(ranks, paths_of_ranks(folder, case.world_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fork_ranks(folder: Path, world_size: int, work: Callable[[], Any]) -> list[int]:
    """Run `work` on every rank of a world of its own, whose files are in `folder`; return the pids."""

    def join_and_work() -> Any:
        init(timeout_s=DEADLINE_S)
        return work()

    paths = paths_of_ranks(folder, world_size)
    return [fork_process(path, _environ(world_size, rank, folder), join_and_work) for rank, path in enumerate(paths)]


def paths_of_ranks(folder: Path, world_size: int) -> list[Path]:
    """Return where the reports of the ranks are, but for the ending."""
    return [folder / f"rank-{rank}" for rank in range(world_size)]


def _environ(world_size: int, rank: int, folder: Path) -> dict[str, str]:
    size = str(world_size)
    return {
        "MSRUN_JOB_ID": folder.name,
        "MSRUN_RENDEZVOUS": f"file://{folder}/store",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }


def fork_process(path: Path, environ: dict[str, str], work: Callable[[], Any]) -> int:
    """Run `work` in a child that writes its report to `path`.out and what it prints to `path`.log; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
        log = os.open(f"{path}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(file=sys.__stderr__)
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
        os.environ.update(environ)
        write_report(path, report_of(work))
    finally:
        os._exit(0)  # the world of a rank that failed is not left, as in a process that an exception ends


def report_of(work: Callable[[], Any]) -> Report:
    """Run `work` and say how it ended."""
    try:
        return Report("done", work(), at_s=time.monotonic())
    except MsrunError as error:
        return _failed("refused", error)
    except BaseException as error:
        return _failed("error", error)


def _failed(kind: str, error: BaseException) -> Report:
    text = f"{type(error).__name__}: {error}"
    return Report(kind, None, text, str(error), traceback.format_exc(), time.monotonic())


def write_report(path: Path, report: Report) -> None:
    """Write it so that it is there as a whole or not at all."""
    draft = Path(f"{path}.part")
    draft.write_bytes(pickle.dumps(report))
    draft.rename(f"{path}.out")


def wait_for(pids: Sequence[int], paths: Sequence[Path]) -> list[Report]:
    """Return the reports of processes, when all have ended or nothing moves any more."""
    alive = dict(zip(pids, paths, strict=True))
    status: dict[int, int] = {}
    looks: list[bool] = []
    needed = int(IDLE_S / POLL_S)
    end = time.monotonic() + DEADLINE_S
    hung = False
    while alive:
        for pid in list(alive):
            found, code = os.waitpid(pid, os.WNOHANG)
            if found:
                status[pid] = code
                del alive[pid]
                looks.clear()
        looks.append(any(_is_running(pid) for pid in alive))
        looks = looks[-needed:]
        idle = len(looks) == needed and sum(looks) < BUSY * needed
        if alive and (idle or time.monotonic() > end):
            hung = True
            for pid in alive:
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        time.sleep(POLL_S)
    found_reports = []
    for pid, path in zip(pids, paths, strict=True):
        written, log = Path(f"{path}.out"), _read(f"{path}.log")
        if written.exists():
            found_reports.append(pickle.loads(written.read_bytes()))
        elif hung and pid in alive:
            found_reports.append(Report("hung", error="waits for ever", trace=log[-6000:]))
        else:
            code = os.waitstatus_to_exitcode(status.get(pid, 0))
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            found_reports.append(Report("died", error=name, trace=log[-6000:]))
    return found_reports


def _is_running(pid: int) -> bool:
    """Return whether any thread of a process runs, or wants to, or waits for a disk."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if task.read_bytes().rpartition(b")")[2].split()[0] in (b"R", b"D"):
                return True
        except OSError:
            continue
    return False


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def prepare_process() -> None:
    """Import, before any fork, what every rank needs, and start no threads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    for name in WORKER_IMPORTS:
        importlib.import_module(name)
    torch._dynamo.trace_rules.clear_lru_cache = lambda: None  # when a world is joined: 0.2 s of each rank

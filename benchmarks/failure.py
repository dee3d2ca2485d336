"""What a launcher costs when a worker fails, while workers idle, and while they write; side by side with peers.

    python benchmarks/failure.py                       all three parts
    python benchmarks/failure.py --quick               small sizes, three runs each
    python benchmarks/failure.py --parts end,idle      some of them: end, idle, write
    python benchmarks/failure.py --sizes 8 --repeats 9

`end` is the time from a worker's exit to the end of its launcher, and until no process of the job is left. `idle` is
the processor time of everything but the workers while these sleep. `write` compares the time in which workers fill
their logs with that of a plain shell that redirects the output of the same program: once with a program that writes
every line at once, so that all ways make the same system calls, and once with one that leaves that to its interpreter.
A shell's redirection then makes Python keep lines back, 8 KiB at a time, and a killed process loses them; msrun writes
every line when it is printed, unless blocks are asked for (`--env PYTHONUNBUFFERED=`). Like is compared with like.

The peers take turns, so that a change of the machine's load meets all of them; medians are compared. A peer that is
not installed is left out with a word.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from failure_job import EXIT_CODE, line
from figures import add_json_option, kept, record
from launch import DEADLINE_S, HERE, environment, row

PROGRAM = str(HERE / "failure_job.py")
MARK = "FAILURE_BENCHMARK_MARK"
"""Set for every process of a job; found again in /proc/PID/environ."""
PARTS = ("end", "idle", "write")
SETTLE_S = 0.5
"""Between the moment that the last worker has come and the moment that is measured from."""
IDLE_SETTLE_S = 5.0
"""The same for idle workers: what a launcher still does after its workers have come is part of the start."""
END_TARGET_S = 0.5
END_TARGET_RATIO = 3.0
IDLE_TARGET_PERCENT = 1.0
WRITE_TARGET_RATIO = 1.1
STOP_S = 15.0
"""What a launcher gets to end a job that it is told to end."""
TARGET_WORKERS = 8

Command = Callable[[int, Path], list[str]]
"""Number of workers and a folder for logs -> what starts PROGRAM on them; its arguments follow."""


IN_BLOCKS = "--env=PYTHONUNBUFFERED="


def msrun_command(count: int, logs: Path, tail: str = "0", *more: str) -> list[str]:
    """Return the command that starts `count` workers with msrun."""
    options = [
        "--worker_num",
        str(count),
        "--device_target=cpu",
        f"--log_dir={logs}",
        f"--tail_worker_log={tail}",
        *more,
    ]
    return [sys.executable, "-m", "msrun", *options, PROGRAM]


def torchrun_command(count: int, logs: Path, redirects: str = "0") -> list[str]:
    """Return the command that starts `count` workers with torchrun."""
    options = ["--standalone", "--nproc-per-node", str(count), "--redirects", redirects, "--log-dir", str(logs)]
    return [sys.executable, "-m", "torch.distributed.run", *options, PROGRAM]


def mpirun_command(count: int, logs: Path, *, files: bool = False) -> list[str]:
    """Return the command that starts `count` workers with mpirun."""
    options = ["--allow-run-as-root", "--oversubscribe", "-np", str(count)]
    options += ["--output-filename", str(logs)] if files else []
    return ["mpirun", *options, sys.executable, PROGRAM]


def shell_command(count: int, logs: Path, setting: str = "") -> list[str]:
    """Return the command that starts `count` workers in the background of a shell, each with its file."""
    loop = f"for rank in $(seq 0 {count - 1}); do"
    worker = f'RANK=$rank {setting} {sys.executable} {PROGRAM} "$@" >{logs}/worker_$rank.log 2>&1'
    return ["/bin/sh", "-c", f"mkdir {logs}; {loop} {worker} & done; wait", "sh"]


@dataclass
class Job:
    """A job whose ranks have all come and settled."""

    process: subprocess.Popen[bytes]
    folder: Path
    mark: str
    worker_pids: list[int]
    begin: float
    """When its launcher was started. Seconds of CLOCK_MONOTONIC, as all moments here."""

    def go(self) -> float:
        """Tell the ranks to begin; return the moment."""
        now = time.monotonic()
        (self.folder / "go").touch()
        return now

    def wait(self) -> float:
        """Wait for the launcher's end; return the moment."""
        descriptor = os.pidfd_open(self.process.pid)
        try:
            if not select.select([descriptor], [], [], DEADLINE_S)[0]:
                raise SystemExit(f"{self.process.args} has not ended within {DEADLINE_S:g} s")
            now = time.monotonic()
        finally:
            os.close(descriptor)
        self.process.wait()
        return now

    def wait_until_gone(self) -> float:
        """Wait until no process of the job is left; return the moment."""
        end = time.monotonic() + DEADLINE_S
        while marked_processes(self.mark):
            if time.monotonic() > end:
                raise SystemExit(f"{self.process.args} has left processes behind")
        return time.monotonic()


@contextmanager
def started(argv: Sequence[str], size: int, folder: Path) -> Iterator[Job]:
    """Start a job, wait for its ranks and let it settle; nothing of it is left afterwards."""
    mark = uuid.uuid4().hex
    env = {**environment(), MARK: mark}
    env.pop("PYTHONUNBUFFERED", None)  # whether output is buffered is one of the things compared
    begin = time.monotonic()
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=said)
    try:
        files = [folder / f"rank_{rank}" for rank in range(size)]
        while not all(file.exists() for file in files):
            if process.poll() is not None or time.monotonic() > begin + DEADLINE_S:
                said_text = (folder / "said").read_text(errors="replace")[-2000:]
                raise SystemExit(f"{argv} did not get {size} ranks (status {process.returncode}):\n{said_text}")
            time.sleep(0.01)
        time.sleep(SETTLE_S)
        yield Job(process, folder, mark, [int(file.read_text()) for file in files], begin)
    finally:
        process.terminate()  # the launcher cleans up; only what it leaves is killed
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        for pid in marked_processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(DEADLINE_S)


def marked_processes(mark: str) -> list[int]:
    """Return every living process of a job."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if wanted in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def new_folder(parent: Path) -> Path:
    """Return an empty folder for one run."""
    return Path(tempfile.mkdtemp(dir=parent))


# -- end ------------------------------------------------------------------------------------------------------------


def measure_end(peers: dict[str, Command], sizes: Sequence[int], repeats: int, parent: Path) -> None:
    """Print how long launchers need from a worker's exit to their own end and to the end of all."""
    for how, words in (("default", "end on TERM at once"), ("handler", "end on TERM in a handler of Python's")):
        print(f"\nworker's exit -> launcher's end, and -> nothing left alive: median ms of {repeats} runs")
        print(f"the other workers sleep and {words}")
        print(row("workers", *(column for name in peers for column in (name, "all gone")), "torchrun/msrun"))
        for size in sizes:
            taken: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
            for _ in range(repeats):
                for name, command in peers.items():
                    taken[name].append(time_end(command, size, how, new_folder(parent)))
            medians = {
                name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()
            }
            ours, ratio = medians["msrun"][1], medians["torchrun"][1] / medians["msrun"][1]
            cells = [f"{1000 * seconds:.0f}" for name in peers for seconds in medians[name]]
            print(row(str(size), *cells, f"{ratio:.1f}x"), flush=True)
            for name, (end_s, gone_s) in medians.items():
                record("end", workers=size, others=how, launcher=name, repeats=repeats, end_s=end_s, all_gone_s=gone_s)
            if size == TARGET_WORKERS:
                tell_target(f"below {1000 * END_TARGET_S:.0f} ms", ours < END_TARGET_S)
                tell_target(f"{END_TARGET_RATIO:g}x faster than torchrun", ratio >= END_TARGET_RATIO)


def time_end(command: Command, size: int, how: str, folder: Path) -> tuple[float, float]:
    """Return the seconds from a worker's exit to its launcher's end and to the end of everything."""
    with started([*command(size, folder / "logs"), str(folder), "fail", how], size, folder) as job:
        job.go()
        end = job.wait()
        gone = max(end, job.wait_until_gone())
        if job.process.returncode not in (EXIT_CODE, 1):  # torchrun ends with 1 whatever the worker's code was
            raise SystemExit(f"{job.process.args} ended with {job.process.returncode}")
        exit_at = float((folder / "exit").read_text())
    return end - exit_at, gone - exit_at


# -- idle -----------------------------------------------------------------------------------------------------------


def measure_idle(peers: dict[str, Command], size: int, duration_s: float, parent: Path) -> None:
    """Print the processor time of everything but the workers while these sleep."""
    print(f"\n{size} workers sleep for {duration_s:g} s: processor time of all other processes of the job")
    print(row("launcher", "% of a core", "ms", "processes", "ms before"))
    for name, command in peers.items():
        folder = new_folder(parent)
        with started([*command(size, folder / "logs"), str(folder), "idle"], size, folder) as job:
            others = [pid for pid in marked_processes(job.mark) if pid not in job.worker_pids]
            time.sleep(IDLE_SETTLE_S)
            before_s = sum(map(processor_s, others))
            begin = time.monotonic()
            time.sleep(duration_s)
            used_s = sum(map(processor_s, others)) - before_s
            percent = 100 * used_s / (time.monotonic() - begin)
        print(
            row(name, f"{percent:.2f}", f"{1000 * used_s:.0f}", str(len(others)), f"{1000 * before_s:.0f}"), flush=True
        )
        record("idle", workers=size, launcher=name, seconds=duration_s, cpu_s=used_s, cpu_before_s=before_s)
        if name == "msrun":
            tell_target(f"below {IDLE_TARGET_PERCENT:g} %", percent < IDLE_TARGET_PERCENT)


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, all threads together.

    Source: /proc/PID/task/TID/schedstat, whose first field is nanoseconds; the ticks of /proc/PID/stat are too coarse.
    """
    files = Path("/proc", str(pid), "task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


# -- write ----------------------------------------------------------------------------------------------------------


def measure_write(has_mpirun: bool, size: int, lines: int, repeats: int, parent: Path) -> None:
    """Print how long workers need to fill their logs, and whether every byte is there."""
    ways: dict[str, tuple[Command, str]] = {
        "shell": (shell_command, "worker_{}.log"),
        "shell, python -u": (lambda n, logs: shell_command(n, logs, "PYTHONUNBUFFERED=1"), "worker_{}.log"),
        "msrun": (lambda n, logs: msrun_command(n, logs, "none"), "worker_{}.log"),
        "msrun, one shown": (msrun_command, "worker_{}.log"),
        "msrun, in blocks": (
            lambda n, logs: msrun_command(n, logs, "none", "--env=PYTHONUNBUFFERED="),
            "worker_{}.log",
        ),
        "torchrun": (lambda n, logs: torchrun_command(n, logs, "3"), "*/attempt_0/{}/stdout.log"),
    }
    if has_mpirun:
        ways["mpirun"] = (lambda n, logs: mpirun_command(n, logs, files=True), "1/rank.{}/stdout")
    expected = [digest_of_lines(rank, lines) for rank in range(size)]
    for how, words in (("each", "the program writes each line at once"), ("print", "the program leaves it to Python")):
        print(f"\n{size} workers write {lines} lines each, {words}: median seconds of {repeats} runs")
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        exact = dict.fromkeys(ways, True)
        for _ in range(repeats):
            for name, (command, pattern) in ways.items():
                folder = new_folder(parent)
                os.sync()  # what the run before has written is no load of this one
                words_of_program = [str(folder), "write", str(lines), how]
                taken[name].append(time_write([*command(size, folder / "logs"), *words_of_program], size, folder))
                files = [pattern.format(rank) for rank in range(size)]
                exact[name] &= [digest_of_file(folder / "logs", file) for file in files] == expected
                shutil.rmtree(folder)
        tell_write(taken, exact, "msrun" if how == "each" else "msrun, in blocks")
        for name, rows in taken.items():
            writing_s, job_s = (statistics.median(column) for column in zip(*rows, strict=True))
            size_of = {"workers": size, "lines": lines, "program": how, "repeats": repeats}
            record("write", **size_of, way=name, writing_s=writing_s, job_s=job_s, is_exact=exact[name])


def time_write(argv: Sequence[str], size: int, folder: Path) -> tuple[float, float]:
    """Return the seconds from the moment that all ranks run, and from the launcher's start, to the job's end."""
    with started(argv, size, folder) as job:
        go = job.go()
        end = job.wait()
        if job.process.returncode != 0:
            raise SystemExit(f"{job.process.args} ended with {job.process.returncode}")
        return end - go, end - job.begin - SETTLE_S


def tell_write(taken: dict[str, list[tuple[float, float]]], exact: dict[str, bool], way: str) -> None:
    """Print the table of one program; `way` is the one of msrun that writes as the shell's worker does."""
    print(row("way", "writing", "of the shell's", "whole job", "of the shell's", "byte-exact"))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()}
    ratios = {name: [a / b for a, b in zip(times, medians["shell"], strict=True)] for name, times in medians.items()}
    for name, times in medians.items():
        cells = [
            text
            for time_s, ratio in zip(times, ratios[name], strict=True)
            for text in (f"{time_s:.2f}", f"{ratio:.2f}x")
        ]
        print(row(name, *cells, "yes" if exact[name] else "NO"))
    for index, part in enumerate(("writing", "whole job")):
        is_met = ratios[way][index] <= WRITE_TARGET_RATIO
        tell_target(f"within {WRITE_TARGET_RATIO:g}x of the shell, {part} ({way})", is_met)
    tell_target("byte-exact", all(is_exact for name, is_exact in exact.items() if name.startswith("msrun")))


def digest_of_lines(rank: int, lines: int) -> str:
    """Return the digest of what a rank writes."""
    digest = hashlib.sha256()
    for number in range(lines):
        digest.update(f"{line(rank, number)}\n".encode())
    return digest.hexdigest()


def digest_of_file(logs: Path, pattern: str) -> str:
    """Return the digest of the one file below `logs` that the pattern names."""
    (path,) = logs.glob(pattern)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------------------------------------------------------


def tell_target(text: str, is_met: bool) -> None:
    """Say whether msrun does what it promises."""
    print(f"    target, msrun {text}: {'met' if is_met else 'MISSED'}", flush=True)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of end,idle,write")
    parser.add_argument("--sizes", default="2,8,32", help="numbers of workers of the part `end`")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--idle-workers", type=int, default=64)
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--lines", type=int, default=1_000_000, help="lines that each of 8 workers writes")
    parser.add_argument("--quick", action="store_true", help="small sizes, three runs each")
    add_json_option(parser)
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.idle_workers, options.idle_seconds, options.lines = "2,8", 8, 10.0, 100_000
        options.repeats = min(3, options.repeats)
    parts = options.parts.split(",")
    if wrong := set(parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(wrong))}: give some of {', '.join(PARTS)}")
    peers: dict[str, Command] = {"msrun": msrun_command, "torchrun": torchrun_command}
    if shutil.which("mpirun"):
        peers["mpirun"] = mpirun_command
    else:
        print("mpirun is not installed: left out")
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # jobs and folders are cleared away then, too
    print(f"python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} processors")
    with kept(options.json), tempfile.TemporaryDirectory(prefix="msrun-benchmark-") as folder:
        if "end" in parts:
            sizes = [int(text) for text in options.sizes.split(",")]
            measure_end(peers, sizes, options.repeats, Path(folder))
        if "idle" in parts:
            measure_idle(peers, options.idle_workers, options.idle_seconds, Path(folder))
        if "write" in parts:
            measure_write("mpirun" in peers, TARGET_WORKERS, options.lines, options.repeats, Path(folder))


if __name__ == "__main__":
    main()

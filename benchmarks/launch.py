"""Start-up of a whole job, side by side with peers in the same run: start, join, one all_reduce, exit.

    python benchmarks/launch.py                  wall time for 1 to 64 workers, and CPU time of --help
    python benchmarks/launch.py --quick          1, 2 and 4 workers
    python benchmarks/launch.py --pss            memory of 32 idle workers that have joined
    python benchmarks/launch.py --large 256      msrun alone with many workers
    python benchmarks/launch.py --warm           msrun --warm beside msrun and torchrun
    python benchmarks/launch.py --restart        from a worker's death to the first all_reduce of the next attempt
    python benchmarks/launch.py --mindspore      real MindSpore: its own msrun beside ours; a failing worker, too

The peers take turns, so that a change of the machine's load meets all of them; medians are compared. A peer that is
not installed is left out with a word.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from figures import add_json_option, kept, record

HERE = Path(__file__).resolve().parent
JOB = str(HERE / "launch_job.py")
MINDSPORE_JOB = str(HERE / "mindspore_job.py")
DEADLINE_S = 600.0
SIZES = (1, 2, 4, 8, 16, 64)
QUICK_SIZES = (1, 2, 4)

Command = Callable[[int], list[str]]


def msrun_command(count: int, *more: str) -> list[str]:
    """Return the command that starts `count` workers with msrun."""
    options = ["--worker_num", str(count), "--quiet", "--tail_worker_log=none", "--device_target=cpu", *more]
    return [sys.executable, "-m", "msrun", *options, "--preload", "msrun.runtime:init", JOB]


def warm_command(count: int) -> list[str]:
    """Return the command that starts `count` workers with msrun, from a process that an earlier one has left."""
    return [*msrun_command(count)[:3], "--warm", *msrun_command(count)[3:]]


def torchrun_command(count: int, *more: str) -> list[str]:
    """Return the command that starts `count` workers with torchrun."""
    options = ["--standalone", "--nproc-per-node", str(count), *more]
    return [sys.executable, "-m", "torch.distributed.run", *options, JOB]


def mpirun_command(count: int) -> list[str]:
    """Return the command that starts `count` workers with mpirun."""
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", str(count), sys.executable, JOB]


def find_peers() -> dict[str, Command]:
    """Return the launchers of this machine, msrun first."""
    peers: dict[str, Command] = {"msrun": msrun_command, "torchrun": torchrun_command}
    if shutil.which("mpirun"):
        peers["mpirun"] = mpirun_command
    else:
        print("mpirun is not installed: left out")
    return peers


def environment() -> dict[str, str]:
    """Return the environment of every run: one compute thread each, and a free port for those who need one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    search = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**os.environ, **address, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, "GLOO_SOCKET_IFNAME": "lo"}


def run(argv: Sequence[str], folder: Path) -> float:
    """Run a command to its good end and return the seconds that it took."""
    begin = time.monotonic()
    done = subprocess.run(argv, cwd=folder, env=environment(), capture_output=True, timeout=DEADLINE_S, check=False)
    seconds = time.monotonic() - begin
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr.decode()[-2000:]}")
    return seconds


def measure_times(peers: dict[str, Command], sizes: Sequence[int], repeats: int, folder: Path) -> None:
    """Print the table of wall times."""
    print(f"\nstart, join, one all_reduce, exit: median seconds of {repeats} runs, peers taking turns")
    others = [name for name in peers if name != "msrun"]
    print(row("workers", *peers, *(f"{name}/msrun" for name in others)))
    for size in sizes:
        times: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(repeats):
            for name, command in peers.items():
                times[name].append(run(command(size), folder))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratios = [f"{medians[name] / medians['msrun']:.1f}x" for name in others]
        print(row(str(size), *(f"{medians[name]:.2f}" for name in peers), *ratios), flush=True)
        record("start", workers=size, repeats=repeats, median_s=medians)


def measure_warm(sizes: Sequence[int], repeats: int, folder: Path) -> None:
    """Print the table of wall times of starts from a warm server, which has imported before the first of them."""
    os.environ["XDG_RUNTIME_DIR"] = str(folder)
    peers = {"msrun": msrun_command, "msrun --warm": warm_command, "torchrun": torchrun_command}
    try:
        for size in sizes:  # another number of threads takes another server
            run(warm_command(size), folder)
            while any(folder.glob("*/*.new")):
                time.sleep(0.1)
        measure_times(peers, sizes, repeats, folder)
    finally:
        run([sys.executable, "-m", "msrun", "--warm=stop"], folder)


def measure_restart(sizes: Sequence[int], repeats: int, folder: Path) -> None:
    """Print the table of times from the death of one worker to the first all_reduce of the next attempt."""
    print(f"\na worker's death -> all_reduce of the next attempt: median seconds of {repeats} runs, peers taking turns")
    commands = {
        "msrun": lambda size: msrun_command(size, "--max_restarts=1"),
        "torchrun": lambda size: torchrun_command(size, "--max-restarts=1"),
    }
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else torchrun finds the store of the first attempt
    print(row("workers", *commands, "torchrun/msrun"))
    for size in sizes:
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(repeats):
            for name, command in commands.items():
                own = Path(tempfile.mkdtemp(dir=folder))
                run([*command(size), "restart", str(own)], own)
                works = [float((own / f"works_{rank}").read_text()) for rank in range(size)]
                times[name].append(max(works) - float((own / "died").read_text()))
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = f"{medians['torchrun'] / medians['msrun']:.1f}x"
        print(row(str(size), *(f"{seconds:.2f}" for seconds in medians.values()), ratio), flush=True)
        record("restart", workers=size, repeats=repeats, median_s=medians)


def measure_mindspore(sizes: Sequence[int], repeats: int, folder: Path) -> None:
    """Print what jobs of real MindSpore take under its own msrun and under ours: in all, and to end when one fails."""
    theirs = [sys.executable, "-c", "from mindspore.parallel.cluster.run import main; main()", "--join=True"]
    commands: dict[str, Callable[[int, Path], list[str]]] = {
        "msrun": lambda size, own: [*msrun_command(size, f"--log_dir={own / 'logs'}")[:-3], MINDSPORE_JOB],
        "MindSpore's": lambda size, own: [
            *(*theirs, f"--worker_num={size}", f"--local_worker_num={size}"),
            *(f"--master_port={environment()['MASTER_PORT']}", f"--log_dir={own / 'logs'}", MINDSPORE_JOB),
        ],
    }
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # theirs runs `python`
    print(f"\nreal MindSpore, median seconds of {repeats} runs, launchers taking turns")
    print(row("workers", *(f"{name}, {what}" for name in commands for what in ("all", "to end")), "exit statuses"))
    for size in sizes:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        statuses: dict[str, int] = {}
        for _ in range(repeats):
            for name, command in commands.items():
                own = Path(tempfile.mkdtemp(dir=folder))
                whole_s = run(command(size, own), own)
                begin = [*command(size, own), "fail", str(own)]
                done = subprocess.run(
                    begin, cwd=own, env=environment(), capture_output=True, timeout=DEADLINE_S, check=False
                )
                statuses[name] = done.returncode
                taken[name].append((whole_s, time.monotonic() - float((own / "died").read_text())))
        medians = {
            name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()
        }
        cells = [f"{seconds:.2f}" for name in commands for seconds in medians[name]]
        print(row(str(size), *cells, ", ".join(map(str, statuses.values()))), flush=True)
        for name, (whole_s, end_s) in medians.items():
            record("mindspore", workers=size, launcher=name, repeats=repeats, whole_s=whole_s, end_s=end_s)


def measure_large(size: int, repeats: int, folder: Path) -> None:
    """Print the wall time of msrun alone with many workers."""
    times = [run(msrun_command(size), folder) for _ in range(repeats)]
    print(f"\nmsrun alone, {size} workers: median {statistics.median(times):.2f} s of {repeats} runs")
    record("large", workers=size, repeats=repeats, median_s={"msrun": statistics.median(times)})


def measure_help(repeats: int) -> None:
    """Print the CPU seconds of --help."""
    commands = {
        "msrun": [sys.executable, "-m", "msrun", "--help"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--help"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, argv in commands.items():
            process = subprocess.Popen(argv, env=environment(), stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds[name].append(usage.ru_utime + usage.ru_stime)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["torchrun"] / medians["msrun"]
    print(f"\n--help, CPU seconds: msrun {medians['msrun']:.3f}, torchrun {medians['torchrun']:.3f} ({ratio:.0f}x)")
    record("help", repeats=repeats, median_cpu_s=medians)


def measure_memory(peers: dict[str, Command], size: int, folder: Path) -> None:
    """Print the proportional set size of whole jobs whose workers have joined and idle."""
    found: dict[str, tuple[float, int]] = {}
    for name, command in peers.items():
        held = Path(tempfile.mkdtemp(dir=folder))
        process = subprocess.Popen(
            [*command(size), "hold", str(held)],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for_ranks(held, size, process)
            pids = [process.pid, *descendants(process.pid)]
            found[name] = (sum(map(pss_bytes, pids)) / 2**20, len(pids))
            (held / "go").touch()
            process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(DEADLINE_S)
    print(f"\n{size} workers that have joined and idle: proportional set size of the whole job")
    print(row("launcher", "MiB", "processes", "ratio"))
    for name, (mebibytes, count) in found.items():
        print(row(name, f"{mebibytes:.0f}", str(count), f"{mebibytes / found['msrun'][0]:.1f}x"))
        record("memory", workers=size, launcher=name, pss_mib=mebibytes, processes=count)


def wait_for_ranks(folder: Path, size: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until every rank has made its file."""
    end = time.monotonic() + DEADLINE_S
    while sum(1 for _ in folder.iterdir()) < size:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"{process.args} did not get {size} ranks to idle (status {process.returncode})")
        time.sleep(0.05)


def descendants(root: int) -> list[int]:
    """Return every process below `root`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def pss_bytes(pid: int) -> int:
    """Return a process's memory, with each shared page counted in equal parts; 0 when it has ended."""
    try:
        lines = Path("/proc", str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def row(*cells: str) -> str:
    """Return one line of a table."""
    return "".join(f" {cell:>15}" for cell in cells)


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="", help="numbers of workers, e.g. 1,2,4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes, three runs each")
    parser.add_argument("--pss", type=int, nargs="?", const=32, metavar="WORKERS", help="measure memory, not time")
    parser.add_argument("--warm", action="store_true", help="starts from a warm server")
    parser.add_argument("--restart", action="store_true", help="how long a failed job takes to start again")
    parser.add_argument("--mindspore", action="store_true", help="jobs of real MindSpore, which has to be installed")
    parser.add_argument("--large", type=int, metavar="WORKERS", help="msrun alone, with this many workers")
    add_json_option(parser)
    options = parser.parse_args()
    repeats = min(3, options.repeats) if options.quick else options.repeats
    sizes = [int(text) for text in options.sizes.split(",") if text] or (QUICK_SIZES if options.quick else SIZES)
    print(f"python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} processors")
    with kept(options.json), tempfile.TemporaryDirectory(prefix="msrun-benchmark-") as folder:
        if options.pss:
            measure_memory(find_peers(), options.pss, Path(folder))
        elif options.warm:
            measure_warm(sizes, repeats, Path(folder))
        elif options.restart:
            measure_restart([size for size in sizes if size > 1], repeats, Path(folder))
        elif options.mindspore:
            measure_mindspore([size for size in sizes if size > 1], repeats, Path(folder))
        elif options.large:
            measure_large(options.large, repeats, Path(folder))
        else:
            measure_times(find_peers(), sizes, repeats, Path(folder))
            measure_help(repeats)


if __name__ == "__main__":
    main()

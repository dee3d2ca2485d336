"""`msrun.run`: a function on all ranks of a job, from a script or a notebook; what each rank returns comes back.

The function, its arguments and what it returns go through files in a folder of this process's own, pickled: by
cloudpickle where that is installed, which takes functions of a notebook, of `__main__` and lambdas too. As a program,
`python -m msrun.launch.function FOLDER`, this is what the ranks run."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msrun import contract
from msrun.errors import UsageError, WorkerFailed
from msrun.launch.directory.log_directory import parse_object, read_bytes
from ranktable.files import replace_file

_LAUNCHER = (  # msrun, which ends with the process that has called `run`, and removes the folder, its last argument
    "import os, shutil, sys\n"
    "from msrun.agent.processes.process_control import die_with_parent\n"
    "die_with_parent(int(sys.argv[1]), 15)\n"
    "from msrun.agent.signals import hold_signals\n"
    "hold_signals()\n"
    "from msrun.cli import main\n"
    "try:\n"
    "    main(sys.argv[2:])\n"
    "finally:\n"
    "    if os.getppid() != int(sys.argv[1]):\n"
    "        shutil.rmtree(sys.argv[-1], ignore_errors=True)\n"
)
_CALL, _JOB = "call", "job"
"""Files in the folder: what to call, and what job does. Beside them one for each rank, with its value and its error."""


def run(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    *,
    workers: int | str = "auto",
    options: Sequence[str] = (),
) -> list[Any]:
    """Call a function on every rank of a job on this host, and return what each has returned, in the order of ranks.

    Output appears as under the command `msrun`, here. The job ends when this process ends, and with Ctrl-C.

    Args:
        workers: how many ranks, or auto, gpu or cpu as for --worker_num.
        options: further options of msrun, as ["--max_restarts=1", "--tail_worker_log=all"].

    Raises:
        Exception: what the function has raised on the first rank that failed, with a note that names the rank.
        WorkerFailed: that rank has ended in another way, such as by a signal.
        UsageError: the function cannot be sent to other processes, or msrun cannot do what is asked."""
    with tempfile.TemporaryDirectory(prefix="msrun-function-") as name:
        folder = Path(name)
        call = _dumps((function, tuple(args), dict(kwargs)), repr(function))
        (folder / _CALL).write_bytes(pickle.dumps((sys.path, call)))  # the path first: modules are found there
        preload = ["--preload=torch"] if "torch" in sys.modules else []
        words = [f"--worker_num={workers}", *preload, *options]
        code = _launch([*words, "-m", __name__, name])
        job = parse_object(read_bytes(folder / _JOB) or b"")
        if code == 0 and job:
            results = [(folder / str(rank)).read_bytes() for rank in range(job["ranks"])]
            return [pickle.loads(result)[0] for result in results]  # noqa: S301 - our own
        report = parse_object(read_bytes(Path(job.get("log_dir", name), contract.FAILURE_JSON)) or b"")
        if not report:
            raise UsageError(
                f"msrun {shlex.join(words)} has ended with {code}: the function has run on no rank; see above"
            )
        first = report["first_failure"] or {}
        error: BaseException | None = None
        with contextlib.suppress(Exception):  # there is none, or it cannot be built again: then the reason tells it
            error = pickle.loads((folder / str(first["global_rank"])).read_bytes())[1]  # noqa: S301 - our own
        if error is None:
            raise WorkerFailed(report["reason"], code)
        error.add_note(f"msrun: {report['reason']}; log: {first['log']}")
        raise error


def _launch(words: Sequence[str]) -> int:
    argv = [sys.executable, "-c", _LAUNCHER, str(os.getpid()), *words]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line.decode(errors="replace"))  # which a notebook shows
                sys.stdout.flush()
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise


def _dumps(value: object, what: str) -> bytes:
    remedy = "; with cloudpickle (pip install cloudpickle) also functions of __main__ are"
    try:
        import cloudpickle as pickler
    except ImportError:
        pickler = pickle
    else:
        remedy = ""
    try:
        data: bytes = pickler.dumps(value)
        if remedy and b"__main__" in data:
            raise pickle.PicklingError("it is of __main__, which ranks do not have")
    except Exception as error:  # noqa: BLE001 - whatever the value's own methods raise
        what = f"{what}: cannot be sent to another process ({type(error).__name__}: {error})"
        raise UsageError(f"{what}; give what can be pickled{remedy}") from None
    return data


def _call(folder: Path) -> None:
    rank = os.environ[contract.RANK]
    job = {"ranks": int(os.environ[contract.WORLD_SIZE]), "log_dir": os.environ[contract.MSRUN_LOG_DIR]}
    # By each: any of them may be the first to fail.
    replace_file(folder / _JOB, json.dumps(job).encode(), mode=contract.FILE_MODE)
    path, data = pickle.loads((folder / _CALL).read_bytes())  # noqa: S301 - our own
    sys.path[:] = path
    function, args, kwargs = pickle.loads(data)  # noqa: S301 - our own
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        with contextlib.suppress(Exception):  # one that cannot be pickled is told by its traceback alone
            (folder / rank).write_bytes(_dumps((None, error), "it"))
        raise
    (folder / rank).write_bytes(_dumps((value, None), f"what rank {rank} returns"))


if __name__ == "__main__":
    _call(Path(sys.argv[1]))

"""A process that has imported what tests import beside msrun, and runs pytest in a fork of itself, again and again.

One JSON object a line: on stdin {folder, path, environment, log, arguments}, on stdout {code} at the end of the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys

MODULES = ("pytest", "hypothesis", "pytest_timeout", "torch", "torch._dynamo", "psutil", "paramiko", "yaml", "rich")


def main() -> None:
    """Serve until stdin ends."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.partition(".")[0] in ("msrun", "ranktable") for name in sys.modules), "tests import another one"
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(asked)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


def _run(asked: dict[str, object]) -> None:
    code = 70
    try:
        os.setsid()
        log = os.open(str(asked["log"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(log)
        os.close(null)
        os.chdir(str(asked["folder"]))
        os.environ.update(asked["environment"])  # type: ignore[call-overload]
        sys.path[:1] = asked["path"]  # type: ignore[call-overload]
        import pytest

        code = int(pytest.main(asked["arguments"]))  # type: ignore[arg-type]
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()

"""Options that start no job: --status and --stop look after one, --warm=stop ends what jobs have left."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from msrun import contract
from msrun.cli.printed_text import print_text
from msrun.errors import UsageError
from msrun.launch import output


def look_after(options: dict[str, Any]) -> int:
    """--status and --stop: show or end the job of a log directory."""
    for name in ("watch", "json"):
        if options[name] and options["status"] is None:
            raise UsageError(f"--{name}: shows a job that was started before; give its --status LOG_DIR, too")
    if options["words"] or (options["status"] is not None and options["stop"] is not None):
        raise UsageError("--status LOG_DIR, --stop LOG_DIR and SCRIPT: give one of the three")
    for name in ("status", "stop"):
        if options[name] is not None and options[name].name.startswith("--"):  # the next option
            raise UsageError(f"--{name} {options[name].name}: give the --log_dir of a job after --{name}")
    if options["stop"] is not None:
        from msrun.launch.status.stop import stop_job

        say = (lambda _: None) if options["quiet"] else output.say_lines
        print_text(stop_job(options["stop"], say))
        return contract.EXIT_OK
    if options["watch"] is not None:
        return _watch(options)
    from msrun.launch.status.job_status import read_status

    status = read_status(options["status"])
    if options["json"]:
        from msrun.launch.status.status_json import render_json

        print_text(render_json(status))
    else:
        from msrun.launch.status.status_text import render_status

        print_text(render_status(status, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return status.status_code


def end_warm_servers(options: dict[str, Any]) -> int:
    """--warm=stop: end the processes that jobs with --warm have left."""
    from msrun.agent.warm.warm_start import stop_warm_servers

    if options["words"]:
        raise UsageError("--warm=stop: ends what earlier jobs have left; leave SCRIPT out")
    count = stop_warm_servers(os.environ)
    if not options["quiet"]:
        print_text(f"stopped {count} warm server{'' if count == 1 else 's'}")
    return contract.EXIT_OK


def _watch(options: dict[str, Any]) -> int:
    from msrun.launch.status.watch import watch_status

    try:
        return watch_status(
            options["status"], None if options["watch"] == "auto" else options["watch"], as_json=options["json"]
        )
    except BrokenPipeError:  # `msrun --status DIR --watch | head` has enough
        output.discard_output(sys.stdout)
        return contract.EXIT_OK

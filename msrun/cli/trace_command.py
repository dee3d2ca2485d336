"""`msrun trace`: one trace of a job. A command only as the first word: a script of that name is `./trace`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("trace", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("log_dir", metavar="LOG_DIR", type=click.Path(path_type=Path))
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="[default: LOG_DIR/trace.json]")
def trace_command(log_dir: Path, output: Path | None) -> str:
    """Write what happened in the job of LOG_DIR as a trace for Perfetto or chrome://tracing.

    Processes of all ranks, and the steps and the waits in collectives of a job that was started with --trace.

    `trace` is this command only as the first word; start a program of that name as `msrun ./trace`.
    """
    from msrun.launch.trace import write_trace

    return write_trace(log_dir, output)

"""From the words of the command line to a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msrun.errors import UsageError
from msrun.planning.program import parse_program
from msrun.planning.simulation import Simulation
from msrun.planning.spec import check_env, parse_env

_NEEDS_A_JOB = ("dry_run", "hosts", "hostfile", "server_num", "trace", "metrics_file", "rank_table_file")


def build_simulation(options: dict[str, Any], caller: dict[str, str]) -> Simulation:
    """Translate the command line's words into a dry run.

    Raises:
        UsageError: a word that cannot be understood, or that only a job can obey.
    """
    for name in _NEEDS_A_JOB:
        if options[name]:
            raise UsageError(f"--sim_level and --{name}: a dry run starts no job; leave --{name} out")
    working_directory = Path(options["chdir"] or ".").absolute()
    if not working_directory.is_dir():
        raise UsageError(f"--chdir {options['chdir']}: no such directory; the script has to start somewhere")
    env = parse_env(options["env"], caller)
    for name, value in env:
        check_env(name, value)
    return Simulation(
        program=parse_program(options["words"], is_module=options["module"], working_directory=working_directory),
        level=options["sim_level"],
        worker_num=options["worker_num"],
        local_worker_num=options["local_worker_num"] or min(8, options["worker_num"]),
        global_rank=options["sim_rank_id"],
        device=options["sim_device"],
        working_directory=working_directory,
        log_dir=Path(options["log_dir"]).absolute(),
        env=env,
    )

"""`python -m msrun.torchrun`: msrun with torchrun's options and defaults: one worker on each host unless told, output
of all ranks, PET_NAME for an option that is not given, and options cut short where only one begins so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from msrun.agent.signals import hold_signals

DEFAULTS = {"nproc_per_node": "1", "redirects": "0"}
SWITCHES = ("standalone", "module", "no_python", "run_path", "virtual_local_rank")
WITH_VALUE = (
    *("nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "max_restarts"),
    *("monitor_interval", "start_method", "event_log_handler", "role", "log_dir", "redirects", "tee", "node_rank"),
    *("local_ranks_filter", "master_addr", "master_port", "local_addr", "logs_specs", "numa_binding"),
    *("signals_to_handle", "shutdown_timeout", "duplicate_stdout_filters", "duplicate_stderr_filters"),
)
"""torchrun's options. Source: torch.distributed.run.get_args_parser, torch 2.12."""


def words_of(argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return torchrun's command line with its defaults, what the environment says, and whole names."""
    found = {name: environ.get(f"PET_{name.upper()}") or DEFAULTS.get(name) for name in WITH_VALUE}
    words = [f"--{name}={value}" for name, value in found.items() if value]
    words += [f"--{name}" for name in SWITCHES if environ.get(f"PET_{name.upper()}", "0") not in ("", "0")]
    from msrun.cli.options import TAKING_VALUE
    from msrun.cli.words import underscored

    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        name, has_value, value = rest.pop(0).partition("=")
        plain = name.removeprefix("--").replace("-", "_")
        names = [known for known in (*SWITCHES, *WITH_VALUE) if known.startswith(plain)] if name[:2] == "--" else []
        whole = plain if plain in names else names[0] if len(names) == 1 else ""
        words.append(f"{f'--{whole}' if whole else name}{has_value}{value}")
        takes_next = whole in WITH_VALUE if whole else name in ("-t", "-r") or underscored(name) in TAKING_VALUE
        if takes_next and not has_value and rest:
            words.append(rest.pop(0))
    return [*words, *rest]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    from msrun.cli import main as run

    run(words_of(sys.argv[1:] if argv is None else argv, os.environ))


if __name__ == "__main__":
    hold_signals()
    main()

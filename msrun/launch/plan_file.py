"""A plan as a file: its page, with the job's rank table and what the script says of its strategy."""

from __future__ import annotations

from pathlib import Path

from msrun.errors import UsageError
from msrun.launch.rank_table_file import build_rank_table, read_given_table
from msrun.planning.hosts.assignment import UNKNOWN
from msrun.planning.plan import LaunchPlan
from msrun.planning.plan_page import render_page
from msrun.planning.spec import LaunchSpec
from msrun.planning.strategy_lines import read_strategy_lines
from ranktable.files import write_whole


def write_page(path: Path, plan: LaunchPlan, spec: LaunchSpec) -> str:
    """Write the page of a plan and return a line that says so.

    Raises:
        UsageError: the file cannot be written, or the rank table is wrong.
    """
    strategy = read_strategy_lines(Path(spec.program.target)) if spec.program.kind == "script" else ()
    page = render_page(plan, _rank_table(plan, spec), strategy)
    try:
        write_whole(path, page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UsageError(f"--plan {path}: cannot be written ({error.strerror}); give another file") from None
    return f"wrote {path}; open it in a browser"


def _rank_table(plan: LaunchPlan, spec: LaunchSpec) -> str:
    """Return the text of the given table, or of the one that the job would get; empty while an address is not known."""
    from ranktable import encode_table

    if spec.rank_table_file:
        return encode_table(read_given_table(spec.rank_table_file))
    if any(assignment.address == UNKNOWN for assignment in plan.fleet):
        return ""
    return encode_table(build_rank_table(plan))

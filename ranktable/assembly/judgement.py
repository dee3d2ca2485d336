"""What validation says of a table that was just made, in the words of who made it: servers and devices, not paths."""

from __future__ import annotations

import re
from collections.abc import Callable

from ranktable.errors import BuildError
from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.profile import ANY_TARGET, Profile
from ranktable.validate import judge_table

_PLACE = re.compile(r"server_list\[(\d+)\](?:\.device\[(\d+)\])?[.\w]*")

NameServer = Callable[[int], str]
"""What to call the server at a place of the list."""


def hold_to_rules(table: RankTable, profile: Profile) -> tuple[Problem, ...]:
    """Return the warnings that validation gives; raises BuildError with the rule for the first error."""
    problems = judge_table(table, profile)
    errors = [problem for problem in problems if problem.is_error]
    if errors:
        raise _refuse(errors, table, profile)
    return problems


def describe(problem: Problem, table: RankTable, name_server: NameServer) -> str:
    """Return what is wrong as `device 3 of server 'a': device_ip = "x": message`, without a path in it."""

    def name(match: re.Match[str]) -> str:
        place, index = match.groups()
        server = name_server(int(place))
        device = "" if index is None else f"device {table.servers[int(place)].devices[int(index)].device_id} of "
        return f"{device}{server}"

    where = _PLACE.sub(name, problem.path) if _PLACE.match(problem.path) else "the table"
    key = problem.path.rpartition(".")[2]
    said = key if problem.value is None else f"{key} = {problem.value}"
    return f"{where}: {said}: {_PLACE.sub(name, problem.message)}"


def _refuse(errors: list[Problem], table: RankTable, profile: Profile) -> BuildError:
    first = errors[0]
    what = describe(first, table, lambda place: f"server {table.servers[place].server_id!r}")
    rules = ", ".join(dict.fromkeys(problem.rule for problem in errors[1:]))
    more = f" and {len(errors) - 1} more of {rules}" if len(errors) > 1 else ""
    target = "" if profile is ANY_TARGET else f" for {profile.chip or profile.device_target}"
    return BuildError(f"{what} ({first.rule}{target}{more})", first.remedy)

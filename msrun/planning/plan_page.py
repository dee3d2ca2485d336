"""The plan as one HTML page that needs no server and no network: hosts, workers, rank table, environment, strategy."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from msrun import __version__
from msrun.planning.masking import mask_words, masked
from msrun.planning.plan import HostPlan, LaunchPlan
from msrun.planning.plan_text import common_to_all, describe_job, fleet_columns, host_columns, worker_columns

PACKAGES = ("msrun.runtime", "msrun.mindspore", "mindspore")
NAMES = frozenset(
    {
        "AutoParallel",
        "GradAccumulation",
        "MicroBatchInterleaved",
        "Pipeline",
        "layerwise_parallel",
        "set_auto_parallel_context",
        "shard",
    }
)
"""Names of these packages that say how a network is divided; MindSpore's words have the same ones."""

Line = tuple[int, str]


def read_strategy_lines(path: Path) -> tuple[Line, ...]:
    """Return the statements that use one of `NAMES`, or what such a statement has made: (number of the line, source).

    Nothing for a file that is no Python text. What is decided when the script runs is not seen.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError):
        return ()
    known = set(_imported(tree))
    found: list[Line] = []
    for statement in _statements(tree):
        if not known & set(_used(statement)):
            continue
        if isinstance(statement, ast.Assign):
            known |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        found.append((statement.lineno, ast.get_source_segment(text, statement) or ""))
    return tuple(found)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Yield the names under which the script knows what says a strategy, and the packages themselves."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            yield from (alias.asname or alias.name for alias in node.names if alias.name in NAMES)
        elif isinstance(node, ast.Import):
            yield from (f"{alias.asname or alias.name}." for alias in node.names if alias.name.startswith(PACKAGES))


def _used(statement: ast.stmt) -> Iterator[str]:
    """Yield the names whose calls a statement holds: `net` of `net.hsdp(...)`, `msrun.runtime.` of its `shard(...)`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            words = ast.unparse(node.func).partition("(")[0]
            package, _, name = words.rpartition(".")
            yield words.partition(".")[0]
            if name in NAMES:
                yield f"{package}."


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the simple statements in the order of the text."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return):
            yield child
        elif isinstance(child, ast.stmt):
            yield from _statements(child)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; margin: .5em 0 1.5em; }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #8884; vertical-align: top; }
td, pre { font-family: ui-monospace, monospace; font-size: 13px; overflow-wrap: anywhere; }
pre { background: #8881; padding: .8em; overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } }
"""


def render_page(plan: LaunchPlan, rank_table: str, strategy: Sequence[Line]) -> str:
    """Return the page. Secrets are masked in it.

    Args:
        rank_table: text of the job's table.
        strategy: from `read_strategy_lines`.
    """
    title = escape(f"msrun {shlex.join(mask_words(plan.hosts[0].argv[1:]))}")
    sections = [
        ("Job", _rows(("", ""), describe_job(plan))),
        ("Settings", _rows(("option", "value", "source"), ((s.name, s.text, s.source) for s in plan.settings))),
        ("Hosts", _columns(host_columns(plan.hosts) if len(plan.hosts) >= len(plan.fleet) else fleet_columns(plan))),
        ("Workers", "\n".join(map(_workers, plan.hosts))),
        ("Parameter servers", _rows(("server", "log"), ((s.index, s.log_path) for s in plan.hosts[0].servers))),
        ("Parallel strategy in the script", _rows(("line", ""), strategy)),
        ("Environment of the workers", _environment(plan)),
        ("Environment that goes to the hosts from here", _variables(plan.forwarded)),
        ("Rank table", f"<pre>{escape(rank_table)}</pre>" if rank_table else ""),
        ("Notes", _rows(("",), ((note,) for note in plan.notes))),
    ]
    body = "\n".join(f"<h2>{name}</h2>\n{text}" for name, text in sections if text)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
        f"<p>Made by msrun {__version__}; nothing was started.</p>\n</body>\n</html>\n"
    )


def _workers(host: HostPlan) -> str:
    binding = [worker.binding for worker in host.workers]
    return f"<h3>{escape(host.name)}</h3>\n{_columns({**worker_columns(host.workers), 'binding': binding})}"


def _columns(columns: Mapping[str, Sequence[str]]) -> str:
    return _rows(list(columns), zip(*columns.values(), strict=True))


def _environment(plan: LaunchPlan) -> str:
    """Return the variables of all workers, then what each host has of its own."""
    common = common_to_all(plan.hosts)
    own = [
        f"<h3>{escape(host.name)}</h3>\n{_variables(different)}"
        for host in plan.hosts
        if (different := {name: value for name, value in host.common_env.items() if name not in common})
    ]
    return "\n".join([_variables(common), *own])


def _variables(env: Mapping[str, str]) -> str:
    return _rows(("variable", "value"), sorted(masked(env).items()))


def _rows(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; nothing without rows."""
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    titles = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>\n" if any(head) else ""
    return f"<table>\n{titles}" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "\n</table>"

"""What a script says of its parallel strategy, as far as its text tells: read, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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

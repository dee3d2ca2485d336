"""What a script imports at its top level, read from the text without running it.

The fork server imports these once so that every worker starts with them. Only packages that are known to be safe to
import in a process that will fork are taken: they start no thread, open no device and read no rank variable at import.
"""

from __future__ import annotations

import ast
from pathlib import Path

SAFE_PACKAGES = frozenset({"torch", "numpy", "msrun"})
"""Top-level packages that the fork server imports unasked; --preload names more."""

OF_OPTIMIZERS = "torch._dynamo"
"""What torch imports when a process makes its first optimizer (torch/_compile.py); takes as long as torch itself."""


def read_preload(script: Path) -> list[str]:
    """Return what to import before forking, as `module` or `module:name`, in order and without repeats.

    `from msrun.runtime import init` gives `msrun.runtime:init`: the runtime's names are loaded lazily, so naming the
    module alone would import nothing. A file that cannot be read or parsed gives an empty list: the worker reports
    the error itself, with the right traceback.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: dict[str, None] = {}
    for statement in _import_statements(tree.body):
        for name in _names(statement):
            if name.split(".")[0].split(":")[0] in SAFE_PACKAGES:
                found[name] = None
    if found and _names_optimizers(tree):
        found[OF_OPTIMIZERS] = None
    return list(found)


def _names_optimizers(tree: ast.Module) -> bool:
    """Return whether `optim` stands anywhere: torch.optim.SGD, from torch import optim, from torch.optim import SGD."""
    return any("optim" in _words(node) for node in ast.walk(tree))


def _words(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.Import):
        return [word for alias in node.names for word in alias.name.split(".")]
    if isinstance(node, ast.ImportFrom):
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    return []


def _import_statements(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    statements: list[ast.Import | ast.ImportFrom] = []
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            statements.append(statement)
        elif isinstance(statement, ast.Try):
            statements.extend(_import_statements(statement.body))
    return statements


def _names(statement: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if statement.level or not statement.module:
        return []
    return [f"{statement.module}:{alias.name}" for alias in statement.names if alias.name != "*"]

"""Names of MindSpore that are not here: the error says what is near and what to use, and so does `--check PATH...`.

The check reads scripts before anything starts, and runs nothing of them: names by way of imports, keywords of what is
called by such a name, and methods of tensors and cells where the name is MindSpore's alone.
"""

from __future__ import annotations

import ast
import dis
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from msrun.errors import near_miss

REMEDIES = {
    "mindrecord": "read the records with MindSpore's mindrecord.FileReader and give them to dataset.GeneratorDataset",
    "MindDataset": "MindRecord files are not read here; use dataset.GeneratorDataset over the records",
    "TFRecordDataset": "use dataset.GeneratorDataset over the records",
    "ImageFolderDataset": "use dataset.GeneratorDataset over the files (PIL.Image.open)",
    "Schema": "give the columns' names to dataset.GeneratorDataset",
    "Custom": "write the operator with torch's functions; gradients follow by themselves",
    "Morph": "write the operator with torch's functions; gradients follow by themselves",
    "SummaryCollector": "use a train.Callback that writes with torch.utils.tensorboard",
    "SummaryRecord": "use torch.utils.tensorboard.SummaryWriter",
    "rewrite": "change the cell's attributes: it is a torch module",
    "load_mindir": "save_checkpoint and load_checkpoint keep weights; export writes a program of torch.export",
    "thor": "use nn.Momentum or nn.Lamb",
    "boost": "use AutoParallel(...).mixed_precision and comm_fusion",
    "COOTensor": "use torch.sparse_coo_tensor",
    "CSRTensor": "use torch.sparse_csr_tensor",
    "RowTensor": "use torch.sparse_coo_tensor",
}
"""Last part of a name -> what to use in its place."""


PACKAGE = "msrun.mindspore"
_METHODS = frozenset(
    """
    asnumpy astype expand_dims set_data init_data to_float init_parameters_data add_flags add_flags_recursive
    set_train set_grad set_comm_fusion set_param_fl set_inputs insert_child_to_cell trainable_params
    untrainable_params parameters_and_names parameters_dict cells_and_names name_cells update_cell_prefix
    update_parameters_name parameters_broadcast_dict add_prim_attr set_prim_instance_name add_pipeline_stage
    create_dict_iterator create_tuple_iterator get_dataset_size set_dataset_sharding flatten_weights offload
    set_boost place inplace_update gather_nd tensor_scatter_add to_coo to_csr sync_batch set_jit_config
    """.split()
)
"""Methods that only objects of MindSpore have."""


def missing_names(path: str, known: Iterable[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of mindspore.PATH: it raises an AttributeError, in `from ... import` an ImportError."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        text = describe_missing(f"{path}.{name}" if path else name, known)
        caller = sys._getframe(1)
        here = caller.f_code.co_code[caller.f_lasti] if caller.f_lasti >= 0 else 0
        raise ImportError(text) if dis.opname[here] == "IMPORT_FROM" else AttributeError(text)

    return __getattr__


def describe_missing(dotted: str, known: Iterable[str]) -> str:
    """Return the sentence for a name below `mindspore` that is not here."""
    name = dotted.rpartition(".")[2]
    words = [] if name in REMEDIES or name.startswith("_") else [word for word in known if not word.startswith("_")]
    near = near_miss(name, words, cutoff=0.75)
    return f"mindspore.{dotted} is not in msrun.mindspore{near}; {remedy(dotted)}"


def remedy(dotted: str) -> str:
    """Return what to use in place of a missing name."""
    parts = dotted.split(".")
    for part in reversed(parts):
        if part in REMEDIES:
            return REMEDIES[part]
    name = parts[-1]
    if "dataset" in parts:
        return "use dataset.GeneratorDataset, or a function given to map"
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    for holder, word in ((torch.nn, name), (torch, snake), (torch.nn.functional, snake), (torch.linalg, snake)):
        if not name.startswith("_") and hasattr(holder, word):
            return f"use {holder.__name__}.{word}: tensors and cells here are torch's"
    return "write it with torch's functions: tensors and cells here are torch's"


class Finding(NamedTuple):
    """One thing that is not here."""

    file: Path
    line: int
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def check(paths: list[Path]) -> tuple[list[Finding], int]:
    """Return what the scripts below paths lack here, and how many files import mindspore."""
    findings: list[Finding] = []
    count = 0
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            try:
                tree = ast.parse(file.read_bytes(), str(file))
            except (SyntaxError, ValueError, RecursionError) as error:
                findings.append(Finding(file, getattr(error, "lineno", 1) or 1, "", f"cannot be read: {error}"))
                continue
            names = _Names(tree)
            count += bool(names.places)
            findings += _findings(file, tree, names) if names.places else []
    return findings, count


class _Names:
    """What a file's names stand for: `nn` -> mindspore.nn."""

    def __init__(self, tree: ast.Module) -> None:
        self.places: list[tuple[int, str]] = []
        self.local: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "mindspore":
                        self.places.append((node.lineno, alias.name))
                        self.local[alias.asname or "mindspore"] = alias.name if alias.asname else "mindspore"
            elif (
                isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "mindspore"
            ):
                for alias in node.names:
                    dotted = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                    self.places.append((node.lineno, str(dotted)))
                    self.local[alias.asname or alias.name] = str(dotted)

    def dotted(self, node: ast.AST) -> str:
        """Return the full name that an expression stands for; "" for what is no name of mindspore's."""
        chain: list[str] = []
        while isinstance(node, ast.Attribute):
            chain.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.local:
            return ".".join([self.local[node.id], *reversed(chain)])
        return ""


def _findings(file: Path, tree: ast.Module, names: _Names) -> Iterator[Finding]:
    said: set[str] = set()
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    uses = [*names.places]
    uses += [(node.lineno, names.dotted(node)) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for line, dotted in sorted(uses):
        first, holder = _first_missing(dotted) if dotted else ("", None)
        if first and first not in said:
            said.add(first)
            yield Finding(file, line, first, describe_missing(first.removeprefix("mindspore."), dir(holder)))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        dotted = names.dotted(node.func)
        if dotted:
            yield from _keywords(file, node, dotted)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS - own and not _has(node.func.attr):
            text = f".{node.func.attr}() is a method of MindSpore's that nothing has here"
            yield Finding(file, node.lineno, f".{node.func.attr}", text)


def _keywords(file: Path, node: ast.Call, dotted: str) -> Iterator[Finding]:
    target = _resolve(dotted)
    taken = None if target is None else _taken(target)
    if taken is None:
        return
    for word in node.keywords:
        if word.arg is not None and word.arg not in taken:
            text = f"{dotted}({word.arg}=...): unknown word{near_miss(word.arg, taken)}; it takes {', '.join(taken)}"
            yield Finding(file, node.lineno, f"{dotted}({word.arg}=)", text)


def _taken(target: Any) -> list[str] | None:
    """Return the keywords that something takes; None when that cannot be told, or it takes any."""
    words = getattr(target, "settings", None)
    if isinstance(target, type) and isinstance(words, tuple):
        return list(words)
    table = getattr(target, "arguments", None)
    try:
        signature = inspect.signature(table if table not in (None, dict) else target)
    except (TypeError, ValueError):
        return None
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds or str(getattr(target, "__module__", "")).startswith("torch"):
        return None
    return [name for name, one in signature.parameters.items() if one.kind != inspect.Parameter.VAR_POSITIONAL]


def _first_missing(dotted: str) -> tuple[str, Any]:
    """Return the shortest part of a name that is not here, and what should hold it; ("", None) when all is here."""
    parts = dotted.split(".")
    here: Any = importlib.import_module(PACKAGE)
    for place, part in enumerate(parts[1:], start=1):
        path = ".".join([PACKAGE, *parts[1 : place + 1]])
        found = sys.modules.get(path) or getattr(here, part, None) or _module(path)
        if found is None:
            is_missing = isinstance(here, type(sys)) and not hasattr(here, part)  # else of a class or of a value
            return (".".join(parts[: place + 1]), here) if is_missing else ("", None)
        here = found
    return "", None


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def _resolve(dotted: str) -> Any:
    here: Any = importlib.import_module(PACKAGE)
    for part in dotted.split(".")[1:]:
        here = getattr(here, part, None)
    return here


def _has(method: str) -> bool:
    from msrun.data import GeneratorDataset
    from msrun.mindspore.nn.cells import Cell
    from msrun.mindspore.ops.table import Primitive

    return any(hasattr(kind, method) for kind in (torch.nn.Parameter, Cell, Primitive, GeneratorDataset))


def report(paths: list[Path]) -> tuple[str, int]:
    """Return the findings with a score, and the exit status: 1 when something is missing."""
    findings, count = check(paths)
    lines = [str(one) for one in findings]
    names = Counter(name for name, _ in sorted({(one.name, one.file) for one in findings}) if name)
    if names:
        most = ", ".join(f"{name.removeprefix('mindspore.')} ({files})" for name, files in names.most_common(20))
        lines.append(f"missing, by files: {most}")
    whole = count - len({one.file for one in findings if one.name})
    share = f", {100 * whole // count} %" if count else ""
    lines.append(f"{whole} of {count} files that import mindspore find all they name{share}")
    return "\n".join(lines), int(bool(findings))

"""What keeps the house in order: import edges, a launcher without torch, frozen names, small modules, live links."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from asked_cases import slow_but

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("msrun", "ranktable", "launch_templates")

_FOUNDATION = {"contract", "errors"}
ALLOWED = {
    "contract": set(),
    "errors": set(),
    "planning": {"planning"} | _FOUNDATION,
    "cluster": {"planning", "cluster"} | _FOUNDATION,
    "agent": {"planning", "cluster", "agent"} | _FOUNDATION,
    "launch": {"planning", "cluster", "agent", "launch"} | _FOUNDATION,
    "cli": {"planning", "cluster", "agent", "launch", "cli"} | _FOUNDATION,
    "__main__": {"agent", "cli", "planning", "torchrun"},
    "torchrun": {"agent", "cli"},
    "__init__": {"launch"},  # msrun.run, when it is asked for
    "shm": {"shm", "runtime"} | _FOUNDATION,
    "runtime": {"runtime", "shm"} | _FOUNDATION,
    "data": {"runtime", "data"} | _FOUNDATION,
    "server": {"runtime", "shm", "server"} | _FOUNDATION,
    "train": {"runtime", "data", "train"} | _FOUNDATION,
    "mindspore": {"runtime", "data", "server", "train", "mindspore"} | _FOUNDATION,
}
"""Which rooms of msrun a room may import from."""

BY_NAME = {"msrun/runtime/__init__.py": {"server", "train"}, "msrun/runtime/data.py": {"data"}}
"""Module -> rooms whose names it passes on, loaded on first use; they import its own."""

OF_THE_RUNTIME_IN_SHM = {"progress"}
"""Of `runtime`, the backend needs what tells the launcher of waits; else it stands on torch alone."""

IN_WORKERS = ("runtime", "mindspore", "shm", "data", "server", "train")
"""Rooms of msrun that run inside a worker, and import torch."""

RUNTIME_ORDER = (
    *("public_names", "requirements", "trace", "progress", "uncaught", "inert_pickle", "tensors", "joining"),
    *("world", "agreement", "member_groups", "nn", "sharding", "groups", "capture", "cost", "partition", "search"),
    *("schedule", "execute", "parts", "optim", "embedding", "parallel", "simulate", "checkpoint"),
)
"""Rooms of msrun/runtime, each importing of these only the ones before it."""

RUNTIME_BACK = {("msrun/runtime/parallel/auto_parallel.py", "simulate")}
"""(module, room that comes later): loaded in a dry run alone, which AutoParallel meets at its first call."""

DECIDED = ("sharding", "capture", "cost", "partition", "search", "schedule")
"""Rooms of msrun/runtime that decide and lower, and know no process group."""

STRANGERS = {"ranktable": {"msrun", "torch", "launch_templates"}, "launch_templates": {"msrun", "torch"}}
"""Which packages a package may not import at all."""


def modules(package):
    """Return every source file of a package."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no modules in {package}"
    return found


def all_modules():
    return [path for package in PACKAGES for path in modules(package)]


def name_of(path):
    return str(path.relative_to(ROOT))


def room_of(path):
    """Return the part of msrun that a file belongs to: `planning` for msrun/planning/plan.py."""
    return path.relative_to(ROOT / "msrun").parts[0].removesuffix(".py")


@dataclass(frozen=True)
class Imports:
    """The dotted names that the import statements of a module name; relative ones are resolved."""

    anywhere: frozenset[str]
    at_import: frozenset[str]
    """When it is imported: not in functions, not what only a type checker sees."""
    only_checked: frozenset[str]


@functools.cache
def imports_of(path):
    found = {}
    package = path.relative_to(ROOT).parts

    def look(node, is_late, is_checked):
        is_late |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_checked |= isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        names = found.setdefault((is_late, is_checked), set())
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: -node.level], *filter(None, [node.module])] if node.level else [node.module or ""]
            names |= {".".join([*base, alias.name]) for alias in node.names}
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            for child in getattr(node, field, ()):
                look(child, is_late, is_checked)

    look(ast.parse(path.read_bytes(), str(path)), is_late=False, is_checked=False)
    return Imports(
        frozenset(name for names in found.values() for name in names),
        frozenset(found.get((False, False), ())),
        frozenset(name for (_, is_checked), names in found.items() if is_checked for name in names),
    )


def test_imports_within_msrun_run_one_way():
    guilty = []
    for path in modules("msrun"):
        names = [name.split(".") for name in imports_of(path).anywhere]
        rooms = {parts[1] for parts in names if parts[0] == "msrun" and len(parts) > 1}
        wrong = {room for room in rooms - ALLOWED[room_of(path)] if not room.startswith("__version")}
        wrong -= BY_NAME.get(name_of(path), set())
        if wrong:
            guilty.append(f"{name_of(path)} imports from {', '.join(sorted(wrong))}")
    assert guilty == []


def test_the_backend_shm_takes_no_more_of_the_runtime_than_progress():
    names = [name.split(".") for path in modules("msrun/shm") for name in imports_of(path).anywhere]
    assert {parts[2] for parts in names if parts[:2] == ["msrun", "runtime"]} == OF_THE_RUNTIME_IN_SHM


def test_imports_within_the_runtime_run_one_way():
    places = {room: number for number, room in enumerate(RUNTIME_ORDER)}
    guilty, back = [], set()
    for path in modules("msrun/runtime"):
        room = path.relative_to(ROOT / "msrun" / "runtime").parts[0].removesuffix(".py")
        if room in ("__init__", "data", "shm"):  # pass on names
            continue
        assert room in places, f"{name_of(path)} is in a room that RUNTIME_ORDER lacks"
        names = [name.split(".") for name in imports_of(path).anywhere]
        rooms = {parts[2] for parts in names if parts[:2] == ["msrun", "runtime"] and len(parts) > 2}
        wrong = {other for other in rooms if places.get(other, 0) > places[room]}
        back |= {(name_of(path), other) for other in wrong} & RUNTIME_BACK
        wrong -= {other for module, other in RUNTIME_BACK if module == name_of(path)}
        guilty += [f"{name_of(path)} imports from {', '.join(sorted(wrong))}"] if wrong else []
    assert guilty == []
    assert back == RUNTIME_BACK


@pytest.mark.parametrize(
    "room",
    ["msrun/planning", "msrun/cluster", "msrun/agent", "msrun/launch", "msrun/cli", "ranktable", "launch_templates"],
)
def test_folders_of_a_room_form_no_circle(room):
    """Each folder counts as one, and each module beside them."""
    home = tuple(room.split("/"))
    imports = {}
    for path in modules(room):
        child = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        names = [tuple(name.split(".")) for name in imports_of(path).anywhere]
        imports.setdefault(child, set()).update(
            name[len(home)] for name in names if name[: len(home)] == home and len(name) > len(home)
        )
    del imports["__init__"]  # a package's face names what is below it
    assert circles(imports) == []


@functools.cache
def modules_by_name():
    return {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in all_modules()
    }


def modules_named(names):
    """Return the modules of ours that hold the names of import statements: of a module, or of what it defines."""
    known = modules_by_name()
    owners = {name if name in known else name.rpartition(".")[0] for name in names}
    return owners & known.keys()


def circles(imports):
    """Return the modules that reach themselves by way of others."""
    left = {name: found - {name} for name, found in imports.items()}
    while free := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in free}
    needed = {name for found in left.values() for name in found}
    return sorted(name for name in left if name in needed)


def test_no_module_imports_itself_by_way_of_others():
    """Neither at its top nor inside its functions; names that only annotations need do not count."""
    assert circles({name: modules_named(in_use(path)) for name, path in modules_by_name().items()}) == []


def in_use(path):
    return imports_of(path).anywhere - imports_of(path).only_checked


def test_what_is_decided_knows_no_process_group():
    guilty = [
        f"{name_of(path)} imports {name}"
        for room in DECIDED
        for path in modules(f"msrun/runtime/{room}")
        for name in imports_of(path).at_import
        if name.startswith(("torch.distributed", "msrun.runtime.groups", "msrun.runtime.world"))
    ]
    assert guilty == []


@pytest.mark.parametrize("package", STRANGERS)
def test_packages_that_stand_alone_import_no_stranger(package):
    guilty = [
        f"{name_of(path)} imports {name}"
        for path in modules(package)
        for name in imports_of(path).anywhere
        if name.split(".")[0] in STRANGERS[package]
    ]
    assert guilty == []


def test_planning_takes_no_more_of_ranktable_than_host_lists_limits_of_text_and_records():
    """One grammar, one set of limits, one base of dataclasses for both; they are pure, and import only the errors."""
    allowed = ("ranktable.hosts.", "ranktable.bounded_text.", "ranktable.record.", "ranktable.errors.")
    guilty = [
        f"{name_of(path)} imports {name}"
        for room in ("msrun/planning", "ranktable/hosts")
        for path in modules(room)
        for name in imports_of(path).anywhere
        if name.startswith("ranktable.") and not name.startswith(allowed)
    ]
    assert guilty == []


FOREIGN = {
    r"\byaml\.((safe_|full_|unsafe_)?load(_all)?|compose(_all)?|parse|scan)\(": ("ranktable/bounded_text.py",),
    r"\bpickle\.(loads?\(|Unpickler\b)|\bmarshal\.loads?\(|\bshelve\.": (
        "msrun/data/inert_pickle.py",
        "msrun/runtime/capture/graph_pickle.py",  # of files in a folder of the user's alone
        "msrun/runtime/checkpoint/",
        "msrun/launch/function.py",
    ),
}
"""What reads files of strangers -> the modules that do it with limits, and run nothing of what they read."""


@pytest.mark.parametrize("pattern", FOREIGN)
def test_foreign_yaml_and_pickles_are_read_by_few_modules(pattern):
    guilty = [name_of(path) for path in all_modules() if re.search(pattern, path.read_text())]
    assert [name for name in guilty if not name.startswith(FOREIGN[pattern])] == []


def test_torch_is_imported_at_module_level_in_the_runtime_only():
    guilty = [
        name_of(path)
        for path in all_modules()
        if not any(path.is_relative_to(ROOT / "msrun" / room) for room in IN_WORKERS)
        and any(name.split(".")[0] in ("torch", "torch_npu") for name in imports_of(path).at_import)
    ]
    assert guilty == []


def test_launcher_help_and_dry_run_never_import_torch(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    names = [name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in all_modules()]
    inside = tuple(f"msrun.{room}" for room in IN_WORKERS)
    names = [name for name in names if not name.startswith(inside) and not name.endswith("__main__")]
    program = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
from msrun.cli import main
for words in (["--help"], ["--dry_run", "train.py"], ["--dry_run=json", "--worker_num=2", "train.py"]):
    try:
        main(words)
    except SystemExit as request:
        assert request.code == 0, (words, request.code)
heavy = sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "numpy"}})
assert heavy == [], heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


CHEAP = [
    ("from msrun.cli import main; main(['--help'])", "rich yaml multiprocessing asyncio numpy"),
    ("from msrun.cli import main; main(['--config=job.yaml', '--grace=-1'])", "torch numpy rich asyncio"),
    ("from launch_templates.cli import main; main(['--help'])", "torch msrun numpy yaml"),
    ("from launch_templates.cli import main; main(['explain', 'slurm'])", "torch msrun numpy"),
    (
        "from launch_templates.cli import main; main('render jobset --set name=a --set image=t:1 -- x.py'.split())",
        "torch msrun numpy",
    ),
    ("import ranktable", "click yaml json dataclasses"),
    ("from ranktable import build_table, encode_table, read_table, validate_table, write_table", "click yaml"),
]


@pytest.mark.parametrize(("statement", "absent"), CHEAP)
def test_cheap_imports_stay_cheap(tmp_path, statement, absent):
    """What --help or a wrong setting needs is little: neither rich nor multiprocessing nor yaml."""
    (tmp_path / "job.yaml").write_text("script: train.py\n")
    program = (
        f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\n"
        f"print(sorted({set(absent.split())} & set(sys.modules)), file=sys.stderr)"
    )
    env = {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr


def test_options_are_the_frozen_ones(golden):
    from msrun.cli import command

    lines = []
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            kind = "flag" if parameter.is_flag else parameter.type.name
            if isinstance(parameter.type, click.Choice):
                kind = "|".join(parameter.type.choices)
            default = parameter.to_info_dict()["default"]
            repeated = " repeatable" if parameter.multiple else ""
            lines.append(f"{' '.join(parameter.opts)}: {kind}{repeated} default={default}")
    golden("msrun_options.txt", "\n".join(sorted(lines)) + "\n")


EXPORTING = ("ranktable", "launch_templates", "msrun.runtime")


@pytest.mark.parametrize("package", EXPORTING)
def test_exported_names_are_the_frozen_ones(package, golden):
    names = importlib.import_module(package).__all__
    assert list(names) == list(dict.fromkeys(names)), "a name is exported twice"
    golden(f"exported_names_{package}.txt", "\n".join(sorted(names)) + "\n")


@pytest.mark.parametrize("package", slow_but(EXPORTING[:2], EXPORTING))
def test_exported_names_are_there(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_environment_and_file_names_of_the_contract_are_the_frozen_ones(golden):
    from msrun import contract

    constants = {name: value for name, value in vars(contract).items() if name.isupper()}
    lines = [
        f"{name} = {sorted(value) if isinstance(value, frozenset) else value!r}" for name, value in constants.items()
    ]
    golden("contract.txt", "\n".join(sorted(lines)) + "\n")


def test_test_modules_have_names_of_their_own():
    """Two of one name cannot be imported side by side."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []

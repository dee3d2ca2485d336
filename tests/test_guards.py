"""What keeps the house in order: import edges, a launcher without torch, frozen names, small modules, live links."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Set
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
PACKAGES = ("msrun", "ranktable", "launch_templates")
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "api", "misc"}

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
    "runtime": {"runtime"} | _FOUNDATION,
    "mindspore": {"runtime", "mindspore"} | _FOUNDATION,
}
"""Which rooms of msrun a room may import from."""

IN_WORKERS = ("runtime", "mindspore")
"""Rooms of msrun that run inside a worker, and import torch."""

RUNTIME_ORDER = (
    *("public_names", "requirements", "trace", "progress", "uncaught", "inert_pickle", "tensors", "joining", "shm"),
    *("world", "agreement", "member_groups", "nn", "sharding", "groups", "capture", "cost", "partition", "search"),
    *("schedule", "execute", "parts", "optim", "embedding", "server", "parallel", "simulate", "checkpoint", "data"),
    *("train",),
)
"""Rooms of msrun/runtime, each importing of these only the ones before it."""

RUNTIME_BACK = {("msrun/runtime/parallel/compile_call.py", "simulate")}
"""(module, room that comes later): loaded in a dry run alone, which AutoParallel meets at its first call."""

DECIDED = ("sharding", "capture", "cost", "partition", "search", "schedule")
"""Rooms of msrun/runtime that decide and lower, and know no process group."""

STRANGERS = {
    "ranktable": {"msrun", "torch", "launch_templates"},
    "launch_templates": {"msrun", "torch"},
}
"""Which packages a package may not import at all."""


def modules(package: str) -> list[Path]:
    """Return every source file of a package."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no modules in {package}"
    return found


def all_modules() -> list[Path]:
    return [path for package in PACKAGES for path in modules(package)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """Return the part of msrun that a file belongs to: `planning` for msrun/planning/plan.py."""
    return path.relative_to(ROOT / "msrun").parts[0].removesuffix(".py")


def imported(nodes: Iterator[ast.AST], path: Path) -> set[str]:
    """Return the dotted names that import statements name; relative ones are resolved."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), str(path))


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Return what a module imports anywhere."""
    return frozenset(imported(ast.walk(parse(path)), path))


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a module is imported: not the bodies of functions, not what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def test_imports_within_msrun_run_one_way() -> None:
    guilty = []
    for path in modules("msrun"):
        names = [name.split(".") for name in imports_of(path)]
        rooms = {parts[1] for parts in names if parts[0] == "msrun" and len(parts) > 1}
        wrong = {room for room in rooms - ALLOWED[room_of(path)] if not room.startswith("__version")}
        if wrong:
            guilty.append(f"{name_of(path)} imports from {', '.join(sorted(wrong))}")
    assert guilty == []


def test_imports_within_the_runtime_run_one_way() -> None:
    places = {room: number for number, room in enumerate(RUNTIME_ORDER)}
    guilty, back = [], set()
    for path in modules("msrun/runtime"):
        room = path.relative_to(ROOT / "msrun" / "runtime").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in places, f"{name_of(path)} is in a room that RUNTIME_ORDER lacks"
        names = [name.split(".") for name in imports_of(path)]
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
def test_folders_of_a_room_form_no_circle(room: str) -> None:
    """Each folder counts as one, and each module beside them."""
    home = tuple(room.split("/"))
    imports: dict[str, set[str]] = {}
    for path in modules(room):
        child = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        names = [tuple(name.split(".")) for name in imports_of(path)]
        imports.setdefault(child, set()).update(
            name[len(home)] for name in names if name[: len(home)] == home and len(name) > len(home)
        )
    del imports["__init__"]  # a package's face names what is below it
    assert circles(imports) == []


NAMED_FOR_TYPES = {
    "msrun.runtime.parallel.auto_parallel": ("parallel.verification.first_step", "parallel.verification.verify"),
    "msrun.runtime.parallel.pipeline.pipelined": (
        "parallel.compilation.compilation",
        "parallel.pipeline.plan",
        "parallel.plan",
        "parallel.plan_traffic",
    ),
}
"""Module -> whom it calls that name its class as the type of an argument, for the type checker alone."""


@functools.cache
def modules_by_name() -> dict[str, Path]:
    return {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in all_modules()
    }


def modules_named(names: Set[str]) -> set[str]:
    """Return the modules of ours that hold the names of import statements: of a module, or of what it defines."""
    known = modules_by_name()
    owners = {name if name in known else name.rpartition(".")[0] for name in names}
    return owners & known.keys()


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that reach themselves by way of others."""
    left = {name: found - {name} for name, found in imports.items()}
    while free := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in free}
    needed = {name for found in left.values() for name in found}
    return sorted(name for name in left if name in needed)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Neither at its top nor inside its functions."""
    assert circles({name: modules_named(in_use(parse(path), path)) for name, path in modules_by_name().items()}) == []


def test_types_close_no_circle_but_the_listed_ones() -> None:
    imports = {
        name: set() if path.name == "__init__.py" else modules_named(imports_of(path))
        for name, path in modules_by_name().items()
    }
    for owner, readers in NAMED_FOR_TYPES.items():
        for reader in readers:
            imports[f"msrun.runtime.{reader}"].remove(owner)
    assert circles(imports) == []


def in_use(tree: ast.Module, path: Path) -> set[str]:
    """Return what a module imports at any time, but for names that only annotations need."""
    checked = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    hidden = imported((inner for node in checked for inner in ast.walk(node)), path)
    return set(imports_of(path) - hidden)


def test_what_is_decided_knows_no_process_group() -> None:
    guilty = [
        f"{name_of(path)} imports {name}"
        for room in DECIDED
        for path in modules(f"msrun/runtime/{room}")
        for name in imported(iter(parse(path).body), path)
        if name.startswith(("torch.distributed", "msrun.runtime.groups", "msrun.runtime.world"))
    ]
    assert guilty == []


@pytest.mark.parametrize("package", STRANGERS)
def test_packages_that_stand_alone_import_no_stranger(package: str) -> None:
    guilty = [
        f"{name_of(path)} imports {name}"
        for path in modules(package)
        for name in imports_of(path)
        if name.split(".")[0] in STRANGERS[package]
    ]
    assert guilty == []


def test_planning_takes_no_more_of_ranktable_than_the_grammar_of_host_lists_and_the_limits_of_text() -> None:
    """One grammar and one set of limits for both; they are pure, and import of ranktable only the errors."""
    allowed = ("ranktable.hosts.", "ranktable.bounded_text.", "ranktable.errors.")
    guilty = [
        f"{name_of(path)} imports {name}"
        for room in ("msrun/planning", "ranktable/hosts")
        for path in modules(room)
        for name in imports_of(path)
        if name.startswith("ranktable.") and not name.startswith(allowed)
    ]
    assert guilty == []


MOVES_FILES = {
    "msrun/launch/directory/jobs.py": "links to the latest job, each made under another name first",
    "ranktable/files.py": "the one writer of files that a user names",
    "msrun/agent/logs/rotated_log.py": "logs are rotated",
    "msrun/agent/warm/warm_server.py": "its socket gets its name when it listens",
    "msrun/launch/transport/agent_code.py": "a program for the other host, which has nothing of ours yet",
    "msrun/runtime/checkpoint/directory.py": "a checkpoint gets its name when it is whole, and loses it before it goes",
    "msrun/runtime/checkpoint/writing.py": "a checkpoint gets its name when it is whole",
    "msrun/runtime/data/criteo.py": "data that is made, in a folder of ours",
    "msrun/runtime/data/digits.py": "data that is made, in a folder of ours",
    "msrun/runtime/data/mnist.py": "data that is made, in a folder of ours",
}
"""Modules that give files another name, and why."""


@functools.cache
def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]


def moves_a_file(call: ast.Call) -> bool:
    """Tell `os.replace(a, b)`, `Path.rename(b)` and `Path.replace(b)` from the `replace(a, b)` of texts and records."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in ("replace", "rename", "renames", "move"):
        return False
    if ast.unparse(call.func.value) in ("os", "shutil"):
        return True
    return len(call.args) == 1 and not call.keywords and call.func.attr in ("replace", "rename")


def test_files_are_moved_into_place_by_one_module_but_for_the_listed_ones() -> None:
    """A rename replaces a device, a pipe or a link that the user has named: `write_whole` looks first."""
    assert {
        name_of(path) for path in all_modules() if any(map(moves_a_file, calls(path)))
    } - MOVES_FILES.keys() == set()


READS_OWN_YAML = {
    "ranktable/bounded_text.py": "the one reader of foreign YAML",
}
UNPICKLES = ("msrun/runtime/data/inert_pickle.py", "msrun/runtime/checkpoint/", "msrun/launch/function.py")
"""Unpicklers that run nothing."""


def test_foreign_yaml_is_read_by_one_module() -> None:
    words = re.compile(r"\byaml\.((safe_|full_|unsafe_)?load(_all)?|compose(_all)?|parse|scan)\(")
    assert {name_of(path) for path in all_modules() if words.search(path.read_text())} == READS_OWN_YAML.keys()


def test_pickles_are_read_by_unpicklers_that_run_nothing() -> None:
    words = re.compile(r"\bpickle\.(loads?\(|Unpickler\b)|\bmarshal\.loads?\(|\bshelve\.")
    guilty = [name_of(path) for path in all_modules() if words.search(path.read_text())]
    assert [name for name in guilty if not name.startswith(UNPICKLES)] == []


def test_files_of_json_are_read_with_limits() -> None:
    """`json.loads(path.read_text())` takes whatever there is; `load_json(read_text(path))` does not."""
    whole = re.compile(r"\.(read_text|read_bytes|read)\(")
    guilty = {
        name_of(path)
        for path in all_modules()
        for call in calls(path)
        if getattr(call.func, "attr", "") in ("load", "loads")
        and ast.unparse(call.func) in ("json.load", "json.loads")
        and (ast.unparse(call.func) == "json.load" or whole.search(ast.unparse(call)))
    }
    own = ("launch_templates/lint/schemas.py", "msrun/runtime/checkpoint/")  # the latter has limits of its own
    assert {name for name in guilty if not name.startswith(own)} == set()


READS_WHOLE_FILES = {
    "msrun/cli/words.py": "the script",
    "msrun/cli/launch_command.py": "the script",
    "msrun/cluster/scheduler.py": "files of the system",
    "msrun/planning/imports.py": "the script",
    "msrun/planning/plan_page.py": "the script",
    "launch_templates/lint/schemas.py": "the package's own table",
}


def test_files_that_options_name_are_read_with_limits() -> None:
    words = re.compile(r"\.(read_text|read_bytes)\(")
    rooms = ("msrun/cli", "msrun/planning", "msrun/cluster", "ranktable", "launch_templates")
    guilty = {name_of(path) for room in rooms for path in modules(room) if words.search(path.read_text())}
    assert guilty == READS_WHOLE_FILES.keys()


def test_torch_is_imported_at_module_level_in_the_runtime_only() -> None:
    guilty = [
        name_of(path)
        for path in all_modules()
        if not any(path.is_relative_to(ROOT / "msrun" / room) for room in IN_WORKERS)
        and any(name.split(".")[0] in ("torch", "torch_npu") for name in imported(at_import(parse(path)), path))
    ]
    assert guilty == []


def test_launcher_writes_its_own_environment_nowhere() -> None:
    """Only a forked child, which is no launcher any more, sets variables, and an agent before it runs msrun's code."""
    not_launchers = {"msrun/agent/processes/child.py", "msrun/launch/transport/agent_code.py"}
    pattern = re.compile(r"os\.environ(\[[^]]*\] = |\.(update|setdefault|pop|clear)\()|os\.(putenv|unsetenv)\(")
    guilty = [
        name_of(path)
        for path in modules("msrun")
        if room_of(path) not in IN_WORKERS and name_of(path) not in not_launchers and pattern.search(path.read_text())
    ]
    assert guilty == []


def test_launcher_help_and_dry_run_never_import_torch(tmp_path: Path) -> None:
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


def test_cheap_imports_stay_cheap() -> None:
    """What --help needs is little: neither rich nor multiprocessing nor yaml."""
    program = (
        "import sys\nfrom msrun.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'rich', 'yaml', 'multiprocessing', 'asyncio', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_options_are_the_frozen_ones(golden: Callable[[str, str], None]) -> None:
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


@pytest.mark.parametrize("package", ["ranktable", "launch_templates", "msrun.runtime"])
def test_exported_names_are_the_frozen_ones(package: str, golden: Callable[[str, str], None]) -> None:
    module = importlib.import_module(package)
    names = sorted(module.__all__)
    assert list(module.__all__) == list(dict.fromkeys(module.__all__)), "a name is exported twice"
    missing = [name for name in names if not hasattr(module, name)]
    assert missing == []
    golden(f"exported_names_{package}.txt", "\n".join(names) + "\n")


def test_environment_and_file_names_of_the_contract_are_the_frozen_ones(golden: Callable[[str, str], None]) -> None:
    from msrun import contract

    constants = {name: value for name, value in vars(contract).items() if name.isupper()}
    lines = [
        f"{name} = {sorted(value) if isinstance(value, frozenset) else value!r}" for name, value in constants.items()
    ]
    golden("contract.txt", "\n".join(sorted(lines)) + "\n")


def test_every_thread_of_launcher_agent_and_scheduler_tells_its_owner_what_it_raises() -> None:
    """Another one would end unnoticed: `cluster.own_thread`."""
    allowed = {"msrun/launch/output.py"}
    guilty = {
        name_of(path)
        for path in modules("msrun")
        if room_of(path) in ("launch", "cluster", "agent", "cli")
        if any(ast.unparse(call.func) in ("threading.Thread", "Thread") for call in calls(path))
    }
    assert guilty <= allowed


def test_launcher_calls_nothing_that_a_descriptor_or_a_worker_can_break() -> None:
    """select(2) takes no descriptor above 1023; a page of a file that somebody else has cut off is SIGBUS."""
    for path in modules("msrun"):
        if room_of(path) in IN_WORKERS:
            continue
        text = path.read_text()
        assert "select.select(" not in text, f"{name_of(path)}: use poll"
        assert not re.search(r"^\s*(import|from) mmap\b", text, re.MULTILINE), f"{name_of(path)}: read, do not map"


def test_modules_are_named_after_things() -> None:
    names = {path: {part.removesuffix(".py") for part in path.relative_to(ROOT).parts} for path in all_modules()}
    assert [name_of(path) for path, parts in names.items() if parts & FORBIDDEN_NAMES] == []


def test_test_modules_have_names_of_their_own() -> None:
    """Two of one name cannot be imported side by side."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []

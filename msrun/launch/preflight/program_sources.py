"""The program's files on this host: its own, and the modules beside it that it imports, each with a digest.

Nothing is imported and nothing is run: imports are read from the text. What is installed elsewhere is not followed;
its version is for the package manager to keep.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from msrun.planning.program import Program

MAX_FILES = 256
MAX_TEXT_BYTES = 4 << 20
"""Of all files whose imports are read."""
MAX_FILE_BYTES = 16 << 20
"""Of one file that is digested; of a larger one its beginning and its size count."""

_IMPORT = re.compile(
    r"^[ \t]*(?:import[ \t]+(?P<modules>[\w., \t]+)"
    r"|from[ \t]+(?P<base>\.*[\w.]*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n#;(]+))",
    re.MULTILINE,
)
_NAME = re.compile(r"\s*([^\W\d]\w*(?:\.\w+)*)")
_COMMENT = re.compile(r"#[^\n]*")


def read_sources(program: Program, working_directory: Path) -> list[tuple[str, str]]:
    """Return name and SHA-256 of the program, then of the modules that it imports from its own folder.

    Names are relative to that folder. Empty for a module that is not found, a built-in one, or one of an archive.

    Raises:
        OSError: the program cannot be read.
    """
    main, folder = _main_file(program, working_directory)
    if main is None:
        return []
    found = {_name(main, folder): _digest(main)}
    if program.is_python and main.resolve().is_relative_to(folder):
        for path in _imported_files(main, folder):
            try:
                found.setdefault(_name(path, folder), _digest(path))
            except OSError:  # the worker says so if it matters
                continue
    return list(found.items())


def _main_file(program: Program, working_directory: Path) -> tuple[Path | None, Path]:
    """Return the file that is run and the folder that it imports from first."""
    if program.kind == "module":
        return _find_module(program.target, working_directory), working_directory
    path = working_directory / program.target
    return path, path.resolve().parent


def _find_module(name: str, working_directory: Path) -> Path | None:
    """Find what `python -m NAME` runs, as importlib does but without importing its parents."""
    places: list[str] | None = [str(working_directory), *sys.path]
    parts = name.split(".")
    for index, _ in enumerate(parts):
        spec = PathFinder.find_spec(".".join(parts[: index + 1]), places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
        if places is None:
            return Path(spec.origin) if index == len(parts) - 1 and spec.origin and spec.has_location else None
    return next((path for place in places or () if (path := Path(place, "__main__.py")).is_file()), None)


def _imported_files(main: Path, folder: Path) -> Iterator[Path]:
    """Yield the files below `folder` that `main` imports, and what those import."""
    waiting, seen, left_bytes = [main.resolve()], {main.resolve()}, MAX_TEXT_BYTES
    while waiting and len(seen) <= MAX_FILES:
        path = waiting.pop()
        try:
            if path.stat().st_size > left_bytes:
                continue
            text = path.read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        left_bytes -= len(text)
        package = path.relative_to(folder).parent.parts if path.is_relative_to(folder) else ()
        for name in _imported_names(text, package):
            for file in _files_of(name, folder):
                if file not in seen:
                    seen.add(file)
                    waiting.append(file)
                    yield file


def _imported_names(text: str, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield what an import statement may name: modules, or what is in them."""
    for match in _IMPORT.finditer(text):
        if match["modules"]:
            yield from (tuple(name.split(".")) for name in _names(match["modules"]))
            continue
        base = match["base"]
        dots = len(base) - len(base.lstrip("."))
        if dots > len(package):  # beyond the folder, which Python refuses, too
            continue
        above = package[: len(package) - dots + 1] if dots else ()
        module = (*above, *(part for part in base.split(".") if part))
        yield from ((*module, name) for name in _names(_COMMENT.sub("", match["names"]).strip("()")))


def _names(text: str) -> list[str]:
    return [match[1] for piece in text.split(",") if (match := _NAME.match(piece))]


def _files_of(name: tuple[str, ...], folder: Path) -> Iterator[Path]:
    """Yield the files that importing a dotted name runs, as far as they are below `folder`."""
    place = folder
    for part in name:
        if (file := place / f"{part}.py").is_file():
            yield file
            return
        place /= part
        if not place.is_dir():
            return
        if (file := place / "__init__.py").is_file():
            yield file


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(MAX_FILE_BYTES))
        if file.read(1):
            digest.update(str(path.stat().st_size).encode())
    return digest.hexdigest()

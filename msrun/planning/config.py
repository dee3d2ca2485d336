"""The file of `--config job.yaml`. Pure: text in, words of a command line out.

What is found is handed on as the words that the command line would hold, letter by letter (`0.10` stays `0.10`), and
takes the same way from there. The file is a YAML mapping:

    version: 1                  # may be left out
    script: train.py            # a file or, with module: true, a module
    args: [--lr, 0.1]
    worker_num: 4               # any option, spelled a_b or a-b; paths count from where msrun is started
    preload: [torch, numpy]     # a repeatable option
    env: {NAME: value}

Only the tree of nodes is read and nothing is constructed: tags can do nothing, and aliases, which multiply, are
refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from msrun.errors import UsageError, near_miss
from msrun.planning.settings import Option
from ranktable.bounded_text import TextError, compose_yaml

if TYPE_CHECKING:
    import yaml

VERSION = 1
MAX_SHOWN_CHARS = 60
MAX_DEPTH = 16
"""A job needs two levels; YAML readers call themselves for every further one."""
PROGRAM_KEYS = ("script", "args", "module")

_WANTED = {
    "whole number": "a whole number such as 8",
    "number": "a number such as 2.5",
    "truth value": "true or false",
    "text": "text",
    "path": "text",
    "JSON": "a single value or a mapping",
}
"""What an option takes -> in words. Any other kind, a choice say, is a single value: any scalar is passed on."""
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\Z")
_YAML = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(("bool", "int", "float", "str", "timestamp", "value"))
_TRUE_WORDS = frozenset(("true", "yes", "on"))


@dataclass(frozen=True)
class JobConfig:
    """A file of settings, as the words that the command line would hold."""

    source: str
    options: Mapping[str, str | list[str]] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    """Where each key stands."""
    env: tuple[tuple[str, str], ...] = ()
    program: tuple[str, ...] = ()
    """Script and arguments."""
    is_module: bool = False

    def place(self, name: str) -> str:
        """Return where a setting stands, for messages."""
        return f"--config {self.source}, line {self.lines[name]}: {name}"


def parse_config(text: str, source: str, options: Mapping[str, Option]) -> JobConfig:
    """Read a file of settings.

    Args:
        source: path of the file, for messages.
        options: those that a file may hold, by name.

    Raises:
        UsageError: naming file, line, key, value and what is expected.
    """
    return _Reader(source, options).read(text)


class _Reader:
    """Reads one file; knows its name for messages."""

    def __init__(self, source: str, options: Mapping[str, Option]) -> None:
        self._source = source
        self._known = options

    def read(self, text: str) -> JobConfig:
        root = self._compose(text)
        if root is None:
            return JobConfig(self._source)
        entries = {key: (line, node) for key, line, node in self._entries(root, "the file", dashes=True)}
        self._check_version(entries)
        options: dict[str, str | list[str]] = {}
        for key, (line, node) in entries.items():
            if key in self._known:
                options[key] = self._option(key, line, node, self._known[key])
            elif key not in (*PROGRAM_KEYS, "env", "version"):
                self._refuse_key(key, line)
        return JobConfig(
            source=self._source,
            options=options,
            lines={key: line for key, (line, _) in entries.items()},
            env=self._env(*entries["env"]) if "env" in entries else (),
            program=self._program(entries),
            is_module="module" in entries and self._is_true("module", *entries["module"]),
        )

    def _compose(self, text: str) -> yaml.Node | None:
        try:
            return compose_yaml(text, max_depth=MAX_DEPTH)
        except TextError as error:
            self._fail(error.line or 1, f"{error.problem}; {error.remedy}")

    def _entries(self, node: yaml.Node, what: str, *, dashes: bool = False) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield key, line and value of a mapping; a key may stand there once."""
        import yaml

        if not isinstance(node, yaml.MappingNode):
            self._fail(_line(node), f"{what}: {_found(node)}; give lines of NAME: value")
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _YAML + "merge":
                self._fail(line, f"{what}: {_found(key_node)} instead of a name; give NAME: value")
            key = key_node.value.replace("-", "_") if dashes else key_node.value
            if key in seen:
                self._fail(line, f"{key}: given twice, first in line {seen[key]}; keep one")
            seen[key] = line
            yield key, line, value_node

    def _check_version(self, entries: Mapping[str, tuple[int, yaml.Node]]) -> None:
        if "version" not in entries:
            return
        line, node = entries["version"]
        version = self._scalar("version", line, node, "whole number")
        if int(version) != VERSION:
            self._fail(line, f"version {version}: this msrun reads version {VERSION}; change the file or msrun")

    def _refuse_key(self, key: str, line: int) -> NoReturn:
        if key == "config":
            self._fail(line, "config: a file cannot name another one; give --config on the command line")
        hint = near_miss(key, [*self._known, *PROGRAM_KEYS, "env", "version"])
        self._fail(line, f"{key}: no such setting{hint}; msrun --help lists the options")

    def _option(self, key: str, line: int, node: yaml.Node, option: Option) -> str | list[str]:
        if not option.is_repeatable:
            return self._scalar(key, line, node, option.kind)
        return self._list(key, line, node, option.kind)

    def _list(self, key: str, line: int, node: yaml.Node, kind: str) -> list[str]:
        import yaml

        if not isinstance(node, yaml.SequenceNode):
            self._fail(line, f"{key}: {_found(node)}; give a list such as [a, b]")
        return [self._scalar(key, _line(item), item, kind) for item in node.value]

    def _env(self, line: int, node: yaml.Node) -> tuple[tuple[str, str], ...]:
        import yaml

        if not isinstance(node, yaml.MappingNode):
            self._fail(line, f"env: {_found(node)}; give {{NAME: value}}")
        return tuple((n, self._scalar(f"env {n}", at, value, "word")) for n, at, value in self._entries(node, "env"))

    def _program(self, entries: Mapping[str, tuple[int, yaml.Node]]) -> tuple[str, ...]:
        if "script" in entries:
            args = self._list("args", *entries["args"], "word") if "args" in entries else []
            return (self._scalar("script", *entries["script"], "text"), *args)
        for key in PROGRAM_KEYS:
            if key in entries:
                self._fail(entries[key][0], f"{key}: there is no script that it belongs to; add script: train.py")
        return ()

    def _scalar(self, key: str, line: int, node: yaml.Node, kind: str) -> str:
        """Return the letters of a value, which has to be of this kind."""
        import yaml

        if kind == "JSON" and isinstance(node, yaml.MappingNode):
            return json.dumps(self._plain(key, node))
        if not (isinstance(node, yaml.ScalarNode) and _is_of(node, kind)):
            self._fail(line, f"{key}: {_found(node)}; give {_WANTED.get(kind, 'a single value')}{_remedy(node, kind)}")
        if not _can_be_passed_on(node.value):
            self._fail(line, f"{key}: holds a character that no command line can; remove it")
        return str(node.value)

    def _plain(self, key: str, node: yaml.Node) -> Any:
        """Return a tree of a mapping as JSON has it; without aliases it is no larger than the file."""
        import yaml

        if isinstance(node, yaml.MappingNode):
            return {name: self._plain(key, value) for name, _, value in self._entries(node, key)}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(key, item) for item in node.value]
        letters = self._scalar(key, _line(node), node, "word")
        return int(letters) if _WHOLE.match(letters) and not getattr(node, "style", None) else letters

    def _is_true(self, key: str, line: int, node: yaml.Node) -> bool:
        return self._scalar(key, line, node, "truth value").lower() in _TRUE_WORDS

    def _fail(self, line: int, message: str) -> NoReturn:
        raise UsageError(f"--config {self._source}, line {line}: {message}")


def _line(node: yaml.Node) -> int:
    """Return where a node begins, from 1."""
    mark = node.start_mark
    return int(mark.line) + 1 if mark is not None else 1


def _is_of(node: yaml.ScalarNode, kind: str) -> bool:
    """Tell by tag and letters; `1e3`, 010 and 1:30 are not what they seem in YAML 1.1, so letters decide on numbers."""
    tag = node.tag.removeprefix(_YAML)
    if kind in ("whole number", "number"):
        pattern = _WHOLE if kind == "whole number" else _NUMBER
        return not node.style and tag in ("int", "float", "str") and bool(pattern.match(node.value))
    if kind == "truth value":
        return tag == "bool"
    return tag in _SCALAR_TAGS and not (kind in ("text", "path") and tag == "bool")


def _found(node: yaml.Node) -> str:
    """Return what stands there, in words."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    tag = node.tag.removeprefix(_YAML)
    if tag == "null":
        return "no value"
    if tag not in _SCALAR_TAGS:
        return "a merge key (<<)" if tag == "merge" else f"the tag {tag}"
    text = node.value if len(node.value) <= MAX_SHOWN_CHARS else node.value[:MAX_SHOWN_CHARS] + "..."
    return f"{text!r} is {'a truth value' if tag == 'bool' else 'a number' if tag in ('int', 'float') else 'text'}"


def _remedy(node: yaml.Node, kind: str) -> str:
    if node.tag == _YAML + "null":
        return " or remove the line" if kind in _WANTED else ", '' for an empty one"
    if node.tag == _YAML + "bool" and kind in ("text", "path"):
        return " in quotes"
    if getattr(node, "style", None) in ("'", '"') and kind in ("whole number", "number"):
        return " without quotes"
    return ""


def _can_be_passed_on(text: str) -> bool:
    try:
        return b"\0" not in text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, from an escape
        return False

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
from msrun.planning.settings import Option, make_option
from ranktable.bounded_text import TextError, compose_yaml

if TYPE_CHECKING:
    import yaml

VERSION = 1
MAX_SHOWN_CHARS = 60
MAX_DEPTH = 16
"""A job needs two levels; YAML readers call themselves for every further one."""

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


_OWN = {
    "version": make_option("version", "N  Of this form of file.", kind="whole number"),
    "script": make_option("script", "FILE  The program."),
    "args": make_option("args", "LIST  Its arguments.", kind="word", is_repeatable=True),
    "module": make_option("module", "The script is a module."),
    "env": make_option("env", "NAMES  Variables of the workers.", kind="variables"),
}
"""What a file may hold beside options."""


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
    """Read a file of settings (UsageError).

    Args:
        source: path of the file, for messages.
        options: those that a file may hold, by name.
    """
    reader = _Reader(source)
    try:
        root = compose_yaml(text, max_depth=MAX_DEPTH)
    except TextError as error:
        reader.fail(error.line or 1, f"{error.problem}; {error.remedy}")
    known = {**options, **_OWN}
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, line, node in reader.entries(root, "the file", dashes=True) if root is not None else ():
        if key == "config":
            reader.fail(line, "config: a file cannot name another one; give --config on the command line")
        if key not in known:
            reader.fail(line, f"{key}: no such setting{near_miss(key, known)}; msrun --help lists the options")
        values[key], lines[key] = reader.value(key, line, node, known[key]), line
    if int(values.get("version", VERSION)) != VERSION:
        message = f"version {values['version']}: this msrun reads version {VERSION}; change the file or msrun"
        reader.fail(lines["version"], message)
    if alone := next((key for key in ("args", "module") if key in values and "script" not in values), ""):
        reader.fail(lines[alone], f"{alone}: there is no script that it belongs to; add script: train.py")
    return JobConfig(
        source=source,
        options={key: value for key, value in values.items() if key in options},
        lines=lines,
        env=values.get("env", ()),
        program=(values["script"], *values.get("args", ())) if "script" in values else (),
        is_module=values.get("module", "no").lower() in _TRUE_WORDS,
    )


class _Reader:
    """Reads the nodes of one file; knows its name for messages."""

    def __init__(self, source: str) -> None:
        self._source = source

    def entries(self, node: yaml.Node, what: str, *, dashes: bool = False) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield key, line and value of a mapping; a key may stand there once."""
        import yaml

        if not isinstance(node, yaml.MappingNode):
            self.fail(_line(node), f"{what}: {_found(node)}; give lines of NAME: value")
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = _line(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _YAML + "merge":
                self.fail(line, f"{what}: {_found(key_node)} instead of a name; give NAME: value")
            key = key_node.value.replace("-", "_") if dashes else key_node.value
            if key in seen:
                self.fail(line, f"{key}: given twice, first in line {seen[key]}; keep one")
            seen[key] = line
            yield key, line, value_node

    def value(self, key: str, line: int, node: yaml.Node, option: Option) -> Any:
        """Return the letters of a setting, of each item of a list, or of pairs of name and value."""
        import yaml

        if option.kind == "variables":
            if not isinstance(node, yaml.MappingNode):
                self.fail(line, f"{key}: {_found(node)}; give {{NAME: value}}")
            found = self.entries(node, key)
            return tuple((name, self._scalar(f"{key} {name}", at, value, "word")) for name, at, value in found)
        if not option.is_repeatable:
            return self._scalar(key, line, node, option.kind)
        if not isinstance(node, yaml.SequenceNode):
            self.fail(line, f"{key}: {_found(node)}; give a list such as [a, b]")
        return [self._scalar(key, _line(item), item, option.kind) for item in node.value]

    def _scalar(self, key: str, line: int, node: yaml.Node, kind: str) -> str:
        """Return the letters of a value, which has to be of this kind."""
        import yaml

        if kind == "JSON" and isinstance(node, yaml.MappingNode):
            return json.dumps(self._plain(key, node))
        if not (isinstance(node, yaml.ScalarNode) and _is_of(node, kind)):
            tag, remedy = node.tag.removeprefix(_YAML), ""
            if tag == "null":
                remedy = " or remove the line" if kind in _WANTED else ", '' for an empty one"
            elif tag == "bool" and kind in ("text", "path"):
                remedy = " in quotes"
            elif getattr(node, "style", None) in ("'", '"') and kind in ("whole number", "number"):
                remedy = " without quotes"
            self.fail(line, f"{key}: {_found(node)}; give {_WANTED.get(kind, 'a single value')}{remedy}")
        text = str(node.value)
        if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):  # half of a pair, from an escape
            self.fail(line, f"{key}: holds a character that no command line can; remove it")
        return text

    def _plain(self, key: str, node: yaml.Node) -> Any:
        """Return a tree of a mapping as JSON has it; without aliases it is no larger than the file."""
        import yaml

        if isinstance(node, yaml.MappingNode):
            return {name: self._plain(key, value) for name, _, value in self.entries(node, key)}
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(key, item) for item in node.value]
        letters = self._scalar(key, _line(node), node, "word")
        return int(letters) if _WHOLE.match(letters) and not getattr(node, "style", None) else letters

    def fail(self, line: int, message: str) -> NoReturn:
        raise UsageError(f"--config {self._source}, line {line}: {message}")


def _line(node: yaml.Node) -> int:
    """Return where a node begins, from 1."""
    return int(node.start_mark.line) + 1 if node.start_mark is not None else 1


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
    tag = node.tag.removeprefix(_YAML)
    if node.id in ("sequence", "mapping"):
        return "a list" if node.id == "sequence" else "a mapping"
    if tag not in _SCALAR_TAGS:
        return {"null": "no value", "merge": "a merge key (<<)"}.get(tag, f"the tag {tag}")
    text = node.value if len(node.value) <= MAX_SHOWN_CHARS else node.value[:MAX_SHOWN_CHARS] + "..."
    return f"{text!r} is {'a truth value' if tag == 'bool' else 'a number' if tag in ('int', 'float') else 'text'}"

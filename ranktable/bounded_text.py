"""YAML and JSON that somebody else may have written: measured first, and built only when it is small. Pure.

A few hundred bytes of YAML can stand for gigabytes (aliases of aliases), a number of a megabyte takes minutes, and deep
nesting ends the interpreter's stack. All commands read foreign YAML and JSON here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

MAX_DEPTH = 100
"""Levels of lists and mappings. A pod has about 15."""
MAX_NODES = 500_000
"""Lists, mappings and values."""
MAX_REPEATED = 100_000
"""Nodes that aliases repeat."""
MAX_DIGITS = 1000
_CHARACTERS = 64
"""Of a text that count as one more value."""
_TAG = "tag:yaml.org,2002:"
_NUMBER_TAGS = (f"{_TAG}int", f"{_TAG}float")
_LONG_NUMBER = r"[-+]?[0-9.][0-9A-Fa-fxXoO_:.+-]*\Z"


class TextError(ValueError):
    """Text that is no YAML or JSON, or stands for too much: `problem`, `remedy` and `line`, from 1 or None."""

    def __init__(self, problem: str, remedy: str, line: int | None = None) -> None:
        self.problem = problem
        self.remedy = remedy
        self.line = line
        super().__init__(f"{self.place}{problem}; {remedy}")

    @property
    def place(self) -> str:
        """The beginning of a message; empty where the line is not known."""
        return "" if self.line is None else f"line {self.line}: "


def _too_deep(max_depth: int, line: int | None = None) -> TextError:
    return TextError(f"more than {max_depth} levels deep", "write it flatter", line)


def _too_long(line: int | None = None) -> TextError:
    return TextError(f"a number of more than {MAX_DIGITS} digits", "put text into quotes", line)


def load_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises TextError: it is no JSON, is more than `MAX_DEPTH` levels deep, or has a number of over `MAX_DIGITS` digits.
    """
    try:
        value = json.loads(text, parse_int=_parse_int)
    except json.JSONDecodeError as error:
        raise TextError(f"not JSON (line {error.lineno}: {error.msg})", "correct the line") from None
    except UnicodeDecodeError:
        raise TextError("not UTF-8 text", "save it as UTF-8") from None
    except RecursionError:
        raise _too_deep(MAX_DEPTH) from None
    if is_deeper(value, MAX_DEPTH):
        raise _too_deep(MAX_DEPTH)
    return value


def is_deeper(value: object, max_depth: int) -> bool:
    """Return whether lists and mappings stand in each other more levels deep than that."""
    level = [holder for holder in [value] if isinstance(holder, dict | list)]
    for _ in range(max_depth):
        holders = (holder.values() if isinstance(holder, dict) else holder for holder in level)
        level = [child for holder in holders for child in holder if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _too_long()
    return int(digits)


def load_yaml(text: str) -> Any:
    """Return the value of a YAML text of one document, None for none; raises what `load_yaml_documents` does."""
    documents = load_yaml_documents(text)
    if len(documents) > 1:
        raise TextError("several documents instead of one", "remove the lines ---")
    return documents[0] if documents else None


def load_yaml_documents(text: str) -> list[Any]:
    """Return the values of all documents of a YAML text; tags can make nothing but plain values.

    Raises TextError: it is no YAML or has a key twice in one mapping; it is more than `MAX_DEPTH` levels deep, has over
    `MAX_NODES` values or a number of over `MAX_DIGITS` digits; aliases repeat more than `MAX_REPEATED` values.
    """
    import yaml

    with _named_faults():
        _measure(yaml.parse(text, Loader=_loader()), MAX_DEPTH, takes_aliases=True)
        return list(yaml.load_all(text, Loader=_unique_key_loader()))


def compose_yaml(text: str, *, max_depth: int) -> yaml.Node | None:
    """Return the nodes of a YAML text, None for none; raises what `load_yaml_documents` does, and for an alias."""
    import yaml

    with _named_faults():
        _measure(yaml.parse(text, Loader=_loader()), max_depth, takes_aliases=False)
        node: yaml.Node | None = yaml.compose(text, Loader=_loader())
        return node


@contextmanager
def _named_faults() -> Iterator[None]:
    """Let what is no YAML be a TextError of one line."""
    import yaml

    try:
        yield
    except TextError:
        raise
    except RecursionError:
        raise _too_deep(MAX_DEPTH) from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        parts = [part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part]
        problem = " ".join((": ".join(parts) or str(error) or type(error).__name__).split())
        line = int(mark.line) + 1 if mark is not None else None
        remedy = "correct the line" if line else "save it as plain text"
        raise TextError(f"not YAML ({problem[:200]})", remedy, line) from None


def _measure(events: Iterator[Any], max_depth: int, *, takes_aliases: bool) -> None:
    """Refuse YAML that stands for too much, event by event, before any of it is built."""
    import yaml

    opened: list[tuple[str | None, int]] = []
    """Anchor of each open list or mapping, and how many nodes there were before it."""
    sizes: dict[str, int] = {}
    count = repeated = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            if not takes_aliases:
                raise TextError(f"*{event.anchor}: aliases are not read", "write the value again", _line(event))
            if any(anchor == event.anchor for anchor, _ in opened):
                raise TextError(f"*{event.anchor} contains itself", "write it out", _line(event))
            size = sizes.get(str(event.anchor), 1)
            count += size
            repeated += size
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
            if len(opened) > max_depth:
                raise _too_deep(max_depth, _line(event))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = count - before
        elif isinstance(event, yaml.ScalarEvent):
            size = 1 + len(event.value) // _CHARACTERS
            count += size
            if event.anchor is not None:
                sizes[event.anchor] = size
            may_be_number = event.implicit[0] or event.tag in _NUMBER_TAGS
            if may_be_number and len(event.value) > MAX_DIGITS and re.match(_LONG_NUMBER, event.value):
                raise _too_long(_line(event))
        elif isinstance(event, yaml.DocumentStartEvent):
            count += 1
        if count > MAX_NODES:
            raise TextError(f"more than {MAX_NODES} values", "split it", _line(event))
        if repeated > MAX_REPEATED:
            raise TextError(f"aliases repeat more than {MAX_REPEATED} values", "write them out", _line(event))


def _line(event: Any) -> int:
    mark = event.start_mark
    return int(mark.line) + 1 if mark is not None else 1


def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@functools.cache
def _unique_key_loader() -> Any:
    """Return a safe loader that refuses a key written twice: Kubernetes does so too, PyYAML takes the last one."""
    import yaml

    class UniqueKeyLoader(_loader()):  # type: ignore[misc]
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"key {key.value!r} is twice", key.start_mark
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)  # type: ignore[no-any-return]

    return UniqueKeyLoader

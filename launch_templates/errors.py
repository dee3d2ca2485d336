"""What can go wrong for the user of launch templates. Every text names the value, the constraint and the remedy."""

import difflib
from collections.abc import Iterable


class LaunchTemplateError(Exception):
    """Base of all errors that a user of this package can cause."""

    exit_code = 2


class UnknownName(LaunchTemplateError):
    """A kind or field name that does not exist: with the near one, or all of them when none is near."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        self.what, self.name, self.known = what, name, tuple(known)
        near = difflib.get_close_matches(name, self.known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(self.known)}"
        super().__init__(f"unknown {what} {name!r}; {hint}")


class MissingValue(LaunchTemplateError):
    """One or more fields without default were not given."""

    def __init__(self, kind: str, names: Iterable[str]) -> None:
        self.kind, self.names = kind, tuple(names)
        settings = [f"add --set {name}=VALUE" for name in self.names if name != "script"]
        remedy = " and ".join([*settings, *(["end the command with -- SCRIPT ARGS"] if "script" in self.names else [])])
        super().__init__(f"kind {kind!r} needs {', '.join(map(repr, self.names))}; {remedy}")


class BadValue(LaunchTemplateError):
    """A value that breaks the constraint of its field, or of two fields together."""

    def __init__(self, name: str, value: object, constraint: str, remedy: str = "") -> None:
        self.name, self.value, self.constraint = name, value, constraint
        self.remedy = remedy or f"change {name}"
        shown = ascii(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        super().__init__(f"{name}={shown}: must be {constraint}; {self.remedy}")


class BadFile(LaunchTemplateError):
    """A file that cannot be read or written, or whose content is not what it should be."""

    def __init__(self, path: str, problem: str, remedy: str) -> None:
        self.path, self.problem, self.remedy = path, problem, remedy
        super().__init__(f"{path}: {problem}; {remedy}")

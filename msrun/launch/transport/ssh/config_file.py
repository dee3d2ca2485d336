"""Files of ssh_config: lines into keywords and arguments, and which of them hold for a host.

The rules are those of ssh_config(5): the first value that is found wins; Host and Match open a part that holds for some
hosts; Include reads further files on the spot, within the part that it stands in.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msrun.errors import UsageError
from msrun.launch.transport.ssh.algorithms import OLD_NAMES
from msrun.launch.transport.ssh.tokens import expand_home
from ranktable.files import read_at_most

MAX_FILE_BYTES = 1 << 20
MAX_INCLUDES = 16
"""Depth of files that include files; ssh has the same limit."""
EXEC_TIME_OUT_S = 10.0
_LINE = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.*)\Z")
_WORD = re.compile(r'\s*(?:"([^"]*)"|([^\s"]\S*))')
_LISTS = ("identityfile", "certificatefile")
"""Keywords of which every value counts."""
_RAW = ("proxycommand", "match")
"""Keywords whose value is the rest of the line, or is taken apart elsewhere."""


@dataclass(frozen=True)
class ConfigLine:
    """One line that says something."""

    keyword: str
    """In lower case."""
    rest: str
    place: str
    """File and line, for errors."""

    def words(self) -> list[str]:
        """Return the arguments; quotes are taken off, and a # ends them.

        Raises:
            UsageError: a quote does not close.
        """
        words = []
        at = 0
        while (match := _WORD.match(self.rest, at)) and not match[0].lstrip().startswith("#"):
            words.append(match[1] if match[1] is not None else match[2])
            at = match.end()
        if not match and self.rest[at:].strip():
            raise UsageError(f"{self.place}: a quote does not close; correct the line")
        return words


@dataclass
class HostOptions:
    """What the files say of one host so far."""

    name: str
    """As the user wrote it."""
    local_user: str
    values: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    is_final: bool = False
    """Whether this is the second reading, with the host's true name."""
    wants_final: bool = False

    def first(self, *keywords: str, default: str = "") -> str:
        """Return the value of the first keyword that has one."""
        return next((self.values[keyword] for keyword in keywords if keyword in self.values), default)


class ConfigFiles:
    """Reads files once each, and applies them to hosts."""

    def __init__(self, expand: Callable[[str, HostOptions], str]) -> None:
        """`expand`: fills in the % tokens of a command of Match exec."""
        self._expand = expand
        self._lines: dict[Path, list[ConfigLine]] = {}

    def apply(self, path: Path, options: HostOptions, *, is_wanted: bool, depth: int = 0) -> None:
        """Add what a file says of a host.

        Args:
            is_wanted: a file that is not there is an error.

        Raises:
            UsageError: the file cannot be read or understood.
        """
        if depth > MAX_INCLUDES:
            raise UsageError(f"{path}: files of ssh_config include each other more than {MAX_INCLUDES} deep")
        holds = True
        for line in self._read(path, is_wanted):
            if line.keyword == "host":
                holds = _matches_patterns(line.words(), options.name)
            elif line.keyword == "match":
                holds = self._matches(line, options)
            elif line.keyword == "include":
                for included in _included(line, path) if holds else ():
                    self.apply(included, options, is_wanted=False, depth=depth + 1)
            elif holds:
                _note(line, options)

    def _read(self, path: Path, is_wanted: bool) -> list[ConfigLine]:
        if path not in self._lines:
            self._lines[path] = list(_parse(_text(path, is_wanted), path))
        return self._lines[path]

    def _matches(self, line: ConfigLine, options: HostOptions) -> bool:
        words = iter(line.words())
        for word in words:
            negated, _, criterion = ("", "", word) if not word.startswith("!") else ("!", "", word[1:])
            criterion, _, value = criterion.partition("=")
            criterion = criterion.lower()
            if criterion in ("all", "final", "canonical"):
                options.wants_final |= criterion != "all"
                found = criterion == "all" or options.is_final
            else:
                value = value or next(words, "")
                found = self._matches_one(criterion, value, line, options)
            if found is bool(negated):
                return False
        return True

    def _matches_one(self, criterion: str, value: str, line: ConfigLine, options: HostOptions) -> bool:
        if criterion == "exec":
            return self._ends_well(self._expand(value, options), line)
        patterns = value.split(",")
        if criterion == "host":
            return _matches_patterns(patterns, options.first("hostname", default=options.name))
        if criterion == "originalhost":
            return _matches_patterns(patterns, options.name)
        if criterion == "user":
            return _matches_patterns(patterns, options.first("user", default=options.local_user))
        if criterion == "localuser":
            return _matches_patterns(patterns, options.local_user)
        raise UsageError(
            f"{line.place}: Match {criterion}: msrun knows all, final, canonical, host, originalhost, user, localuser "
            "and exec; leave such parts to another file and give --ssh_config"
        )

    @staticmethod
    def _ends_well(command: str, line: ConfigLine) -> bool:
        shell = ["/bin/sh", "-c", command]
        try:
            return not subprocess.run(
                shell, stdin=subprocess.DEVNULL, capture_output=True, timeout=EXEC_TIME_OUT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            raise UsageError(f"{line.place}: Match exec: takes more than {EXEC_TIME_OUT_S:g} s") from None


def _text(path: Path, is_wanted: bool) -> str:
    try:
        data = read_at_most(path, MAX_FILE_BYTES + 1, lambda found: _check_owner(path, found))
    except OSError as error:
        if is_wanted or not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise UsageError(f"{path}: cannot be read ({error.strerror}); give a readable ssh_config") from None
        return ""
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path}: more than {MAX_FILE_BYTES} bytes; give a file of ssh_config")
    return data.decode("utf-8", "surrogateescape")


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Refuse, as ssh does, what somebody else may have written: it says which commands are run here."""
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid not in (0, os.getuid()):
        raise UsageError(f"{path}: bad owner of an ssh_config (user {found.st_uid}); it must be yours or root's")
    if mode & 0o022:
        raise UsageError(
            f"{path}: bad permissions of an ssh_config ({mode:04o}): others may write it; chmod go-w {path}"
        )


def _parse(text: str, path: Path) -> Iterator[ConfigLine]:
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if "\0" in line:
            raise UsageError(f"{path}, line {number}: holds a NUL byte; give a file of ssh_config")
        if not match:
            raise UsageError(f"{path}, line {number}: {line.split()[0]!r} has no value; write Keyword value")
        keyword = OLD_NAMES.get(match[1].lower(), match[1].lower())
        yield ConfigLine(keyword, match[2], f"{path}, line {number}")


def _included(line: ConfigLine, path: Path) -> Iterator[Path]:
    base = Path("/etc/ssh") if path.is_relative_to("/etc/ssh") else Path("~/.ssh").expanduser()
    for word in line.words():
        pattern = expand_home(word, f"{line.place}: Include")
        whole = pattern if pattern.is_absolute() else base / pattern
        try:
            yield from sorted(Path(whole.anchor).glob(str(whole.relative_to(whole.anchor))))
        except (ValueError, NotImplementedError, IndexError):
            raise UsageError(f"{line.place}: Include {word}: no pattern of files; correct it") from None


def _note(line: ConfigLine, options: HostOptions) -> None:
    keyword = line.keyword
    if keyword in _RAW:
        options.values.setdefault(keyword, line.rest)
    elif keyword in _LISTS:
        found = options.lists.setdefault(keyword, [])
        found += [word for word in line.words()[:1] if word not in found]
    elif keyword.endswith("knownhostsfile"):
        options.lists.setdefault(keyword, []).extend(line.words() if not options.lists.get(keyword) else ())
    else:
        options.values.setdefault(keyword, next(iter(line.words()), ""))


def _matches_patterns(patterns: Sequence[str], text: str) -> bool:
    """Match as ssh does: only * and ? are special, case does not count, and one negated match settles it."""
    text = text.lower()
    found = False
    for pattern in patterns:
        bare = pattern.removeprefix("!").lower().replace("[", "[[]")
        if fnmatch.fnmatchcase(text, bare):
            if pattern.startswith("!"):
                return False
            found = True
    return found

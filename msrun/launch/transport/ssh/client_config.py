"""ClientConfig: from the name of a host to an SshTarget, by the rules of ssh_config(5)."""

from __future__ import annotations

import fnmatch
import getpass
import os
import re
import socket
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msrun.errors import UsageError
from msrun.launch.transport.ssh.target import DEFAULT_PORT, SshTarget
from msrun.planning.hosts.host_entry import MAX_PORT
from msrun.planning.spec import NO_CONFIG, HostKeyPolicy, SshSettings
from ranktable.files import read_at_most

KEYWORDS: Mapping[str, str] = {
    "ciphers": "Ciphers",
    "macs": "MACs",
    "kexalgorithms": "KexAlgorithms",
    "hostkeyalgorithms": "HostKeyAlgorithms",
    "pubkeyacceptedalgorithms": "PubkeyAcceptedAlgorithms",
    "casignaturealgorithms": "CASignatureAlgorithms",
}
OLD_NAMES: Mapping[str, str] = {"pubkeyacceptedkeytypes": "pubkeyacceptedalgorithms"}
AUTHORITY_SIGNATURES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "rsa-sha2-512",
    "rsa-sha2-256",
)
"""By which a certificate may be signed: not with SHA-1."""
_SAME: Mapping[str, str] = {"curve25519-sha256": "curve25519-sha256@libssh.org"}
"""Two names of one algorithm; servers have both, paramiko the second."""


def choose_algorithms(given: str, usual: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """Return what a list of ssh_config leaves, the likeliest first; empty when it leaves nothing.

    A list replaces the usual ones; after + it is appended to them, after ^ put before them, and after - taken away.

    Args:
        given: patterns, with commas between them.
        usual: what is offered without a list.
        known: all that could be offered.
    """
    sign = given[:1] if given[:1] in ("+", "-", "^") else ""
    patterns = [_SAME.get(word, word) for word in given.removeprefix(sign).split(",") if word]
    every = dict.fromkeys([*usual, *known])
    named = [name for pattern in patterns for name in every if fnmatch.fnmatchcase(name, pattern)]
    if sign == "-":
        return tuple(name for name in usual if name not in named)
    before, after = {"": ((), ()), "+": (usual, ()), "^": ((), usual)}[sign]
    return tuple(dict.fromkeys([*before, *named, *after]))


_TOKEN = re.compile(r"%(.?)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_SHELL_TEXT = re.compile(r"[\s\x00-\x20\x7f'`\"$\\;&<>|(){}]")
"""What no host name holds; ssh itself refuses these before it gives a name to a ProxyCommand."""


def check_command_word(what: str, word: str) -> None:
    """Refuse a host or user name that a shell, or an option parser, would take for something else.

    Raises:
        UsageError: naming it.
    """
    if word.startswith("-") or _SHELL_TEXT.search(word):
        raise UsageError(f"{what} {word!r}: starts with '-' or holds shell text; correct the name")


def expand_tokens(text: str, tokens: Mapping[str, Callable[[], str]], place: str) -> str:
    """Fill in % tokens; %% is a %.

    Raises:
        UsageError: a token that does not belong here.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] == "%":
            return "%"
        if match[1] not in tokens:
            known = " ".join(f"%{name}" for name in sorted(tokens))
            raise UsageError(f"{place} {text}: {match[0]} is not known here; msrun knows {known} and %%")
        return tokens[match[1]]()

    return _TOKEN.sub(value, text)


def expand_path(text: str, tokens: Mapping[str, Callable[[], str]], place: str) -> Path:
    """Fill in % tokens and ${VARIABLE}s, and ~ at the beginning.

    Raises:
        UsageError: a token that does not belong here, or a variable that is not set.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise UsageError(f"{place} {text}: {match[1]} is not set in the environment")
        return os.environ[match[1]]

    return expand_home(_VARIABLE.sub(value, expand_tokens(text, tokens, place)), f"{place} {text}")


def expand_home(text: str, place: str) -> Path:
    """Return a path in which ~ and ~user are homes.

    Raises:
        UsageError: there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UsageError(f"{place}: there is no user {text.partition('/')[0].removeprefix('~')!r}") from None


def local_tokens(local_user: str) -> dict[str, Callable[[], str]]:
    """Return the tokens that say something of this side."""
    return {
        "d": lambda: str(Path("~").expanduser()),
        "i": lambda: str(os.getuid()),
        "L": lambda: socket.gethostname().partition(".")[0],
        "l": socket.gethostname,
        "u": lambda: local_user,
    }


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


USER_CONFIG = "~/.ssh/config"
SYSTEM_CONFIG = "/etc/ssh/ssh_config"
DEFAULT_IDENTITIES = ("~/.ssh/id_rsa", "~/.ssh/id_ecdsa", "~/.ssh/id_ed25519")
DEFAULT_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
DEFAULT_GLOBAL_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
MAX_HOPS = 8
MIN_RSA_BITS = 1024
"""RequiredRSASize of ssh, unless ssh_config says more."""
_STRICTNESS: dict[str, HostKeyPolicy] = {"accept-new": "accept-new", "no": "off", "off": "off"}
"""StrictHostKeyChecking; whatever else it is, yes and ask too, is strict, for nobody is asked."""
_IGNORED = {
    "bindaddress": "BindAddress",
    "bindinterface": "BindInterface",
    "canonicalizehostname": "CanonicalizeHostname",
    "certificatefile": "CertificateFile",
    "knownhostscommand": "KnownHostsCommand",
    "pkcs11provider": "PKCS11Provider",
    "rekeylimit": "RekeyLimit",
    "securitykeyprovider": "SecurityKeyProvider",
    "verifyhostkeydns": "VerifyHostKeyDNS",
}
"""What changes a connection of ssh and not one of msrun; without any of them fewer hosts are let pass, not more."""
_JUMP = re.compile(r"(?:ssh://)?(?:(.+)@)?(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:@/]+))(?::(\d+))?/?\Z")
_SECONDS = re.compile(r"(\d+)([smhdw]?)\Z", re.IGNORECASE)
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Tokens = dict[str, Callable[[], str]]


class ClientConfig:
    """What the user's and the system's ssh_config, or the file of --ssh_config, say of hosts. Used by one thread."""

    def __init__(self, settings: SshSettings) -> None:
        """Read nothing yet."""
        self._settings = settings
        self._local_user = getpass.getuser()
        self._files = ConfigFiles(self._expand_match)
        self.ignored: set[str] = set()
        """Keywords that were given for some host and that msrun does not know."""

    def resolve(self, name: str, *, user: str = "", port: int = 0) -> SshTarget:
        """Return how to get to a host.

        Args:
            user: of the host list; empty = --ssh_user, else ssh_config, else the user here.
            port: of the host list; 0 = --ssh_port, else ssh_config, else 22.

        Raises:
            UsageError: ssh_config cannot be read or understood, or says what cannot be done.
        """
        given = {"user": user or self._settings.user, "port": str(port or self._settings.port or "")}
        return self._resolve(name, {key: value for key, value in given.items() if value}, None, 0)

    def _resolve(self, name: str, given: dict[str, str], jumps: list[str] | None, depth: int) -> SshTarget:
        if depth > MAX_HOPS:
            raise UsageError(f"{name}: more than {MAX_HOPS} jump hosts, one behind the other; is there a loop?")
        check_command_word("host", name)
        options = self._read(name, given)
        self._note_ignored(options)
        host_name = options.first("hostname", default=name)
        user = options.first("user", default=self._local_user)
        check_command_word("HostName", host_name)
        check_command_word("User", user)
        tokens = self._tokens(options)
        port = _port(options)
        via, command = self._route(options, tokens, jumps, depth)
        plain = options.first("hostkeyalias") or host_name.lower()
        with_port = f"[{plain}]:{port}" if port != DEFAULT_PORT and not options.first("hostkeyalias") else plain
        named = self._identities(options, tokens)
        return SshTarget(
            name=name,
            host_name=host_name,
            user=user,
            port=port,
            identity_files=named or tuple(Path(path).expanduser() for path in DEFAULT_IDENTITIES),
            named_identity_files=frozenset(named),
            identities_only=options.first("identitiesonly").lower() in ("yes", "true"),
            agent_socket=self._agent_socket(options, tokens),
            may_prompt=options.first("batchmode").lower() not in ("yes", "true"),
            via=via,
            proxy_command=command,
            known_hosts_files=_paths(options, "userknownhostsfile", DEFAULT_KNOWN_HOSTS, tokens),
            global_known_hosts_files=_paths(options, "globalknownhostsfile", DEFAULT_GLOBAL_KNOWN_HOSTS, tokens),
            host_key_name=with_port,
            plain_host_key_name=plain if plain != with_port else "",
            certificate_name=plain,
            revoked_host_keys=_path(options, "revokedhostkeys", tokens),
            algorithms=tuple((word, options.values[word]) for word in KEYWORDS if word in options.values),
            min_rsa_bits=_bits(options),
            host_keys=self._settings.host_keys
            or _STRICTNESS.get(options.first("stricthostkeychecking").lower(), "strict"),
            hash_known_hosts=options.first("hashknownhosts").lower() in ("yes", "true"),
            tcp_time_out_s=_seconds(options),
            address_family=options.first("addressfamily", default="any").lower(),
        )

    def _note_ignored(self, options: HostOptions) -> None:
        asked = {word for word in _IGNORED if options.first(word, default="no").lower() not in ("no", "none")}
        self.ignored |= {_IGNORED[word] for word in asked | (options.lists.keys() & _IGNORED.keys())}
        if options.first("proxyusefdpass").lower() in ("yes", "true"):
            raise UsageError(
                f"{options.name}: ssh_config: ProxyUseFdpass yes: not supported; let the ProxyCommand pass the bytes"
            )

    def _read(self, name: str, given: dict[str, str]) -> HostOptions:
        """Return what the files say of a host; read again, with its true name, where they have a Match final."""
        options = HostOptions(name, self._local_user, dict(given))
        self._apply(options)
        if options.wants_final:
            options.is_final = True
            self._apply(options)
        if "hostname" in options.values:
            text = options.values["hostname"]
            options.values["hostname"] = expand_tokens(text, {"h": lambda: name}, "ssh_config: HostName")
        return options

    def _apply(self, options: HostOptions) -> None:
        given = self._settings.config_file
        if given is not None:
            if str(given) != NO_CONFIG:
                self._files.apply(given, options, is_wanted=True)
            return
        for path in (USER_CONFIG, SYSTEM_CONFIG):
            self._files.apply(Path(path).expanduser(), options, is_wanted=False)

    def _tokens(self, options: HostOptions) -> Tokens:
        return {
            **local_tokens(self._local_user),
            "h": lambda: options.first("hostname", default=options.name),
            "k": lambda: options.first("hostkeyalias", default=options.name),
            "n": lambda: options.name,
            "p": lambda: options.first("port", default=str(DEFAULT_PORT)),
            "r": lambda: options.first("user", default=self._local_user),
        }

    def _expand_match(self, text: str, options: HostOptions) -> str:
        return expand_tokens(text, self._tokens(options), "ssh_config: Match exec")

    def _identities(self, options: HostOptions, tokens: Tokens) -> tuple[Path, ...]:
        texts = [text for text in options.lists.get("identityfile", []) if text.lower() != "none"]
        configured = [expand_path(text, tokens, "ssh_config: IdentityFile") for text in texts]
        given = [path.expanduser() for path in self._settings.identity_files]
        return tuple(dict.fromkeys([*given, *configured]))

    @staticmethod
    def _agent_socket(options: HostOptions, tokens: Tokens) -> str:
        text = options.first("identityagent", default="SSH_AUTH_SOCK")
        if text.lower() == "none":
            return ""
        if text == "SSH_AUTH_SOCK" or (text.startswith("$") and not text.startswith("${")):
            return os.environ.get(text.removeprefix("$"), "")
        return str(expand_path(text, tokens, "ssh_config: IdentityAgent"))

    def _route(
        self, options: HostOptions, tokens: Tokens, jumps: list[str] | None, depth: int
    ) -> tuple[SshTarget | None, str]:
        """Return jump host and ProxyCommand, one of the two or none; what ssh_config names first holds."""
        if jumps is None:
            first = next((key for key in options.values if key in ("proxyjump", "proxycommand")), "")
            text = options.first(first)
            if text.lower() in ("", "none"):
                return None, ""
            some = {key: tokens[key] for key in "hnpr"}
            if first == "proxycommand":
                return None, expand_tokens(text, some, "ssh_config: ProxyCommand")
            jumps = [word.strip() for word in expand_tokens(text, some, "ssh_config: ProxyJump").split(",")]
        if not jumps:
            return None, ""
        name, given = _parse_jump(jumps[-1])
        # A list says the whole way; without one the way to the last hop is that of its own ssh_config.
        return self._resolve(name, given, jumps[:-1] if len(jumps) > 1 else None, depth + 1), ""


def _parse_jump(text: str) -> tuple[str, dict[str, str]]:
    """Turn `[user@]host[:port]` or ssh://[user@]host[:port] into a name and what it says of it."""
    match = _JUMP.match(text)
    if not match:
        raise UsageError(f"ssh_config: ProxyJump {text}: write [user@]host[:port]")
    given = {"user": match[1] or "", "port": match[4] or ""}
    return match[2] or match[3], {key: value for key, value in given.items() if value}


def _port(options: HostOptions) -> int:
    text = options.first("port", default=str(DEFAULT_PORT))
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MAX_PORT):
        raise UsageError(f"{options.name}: ssh_config: Port {text}: must be 1 to {MAX_PORT}")
    return int(text)


def _seconds(options: HostOptions) -> float:
    text = options.first("connecttimeout", default="0")
    if text.lower() == "none":
        return 0.0
    match = _SECONDS.match(text)
    if not match:
        raise UsageError(f"{options.name}: ssh_config: ConnectTimeout {text}: give seconds such as 10")
    return float(int(match[1]) * _UNIT_S[match[2].lower()])


def _bits(options: HostOptions) -> int:
    text = options.first("requiredrsasize", default=str(MIN_RSA_BITS))
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise UsageError(f"{options.name}: ssh_config: RequiredRSASize {text}: give a number of bits such as 2048")
    return int(text)


def _path(options: HostOptions, keyword: str, tokens: Tokens) -> Path | None:
    text = options.first(keyword, default="none")
    return None if text.lower() == "none" else expand_path(text, tokens, f"ssh_config: {keyword}")


def _paths(options: HostOptions, keyword: str, defaults: tuple[str, ...], tokens: Tokens) -> tuple[Path, ...]:
    texts = options.lists.get(keyword) or defaults
    return tuple(expand_path(text, tokens, f"ssh_config: {keyword}") for text in texts if text.lower() != "none")

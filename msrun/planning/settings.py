"""Settings of a job and where they came from: the command line, MSRUN_<OPTION> in the environment, a file, a default.

What is nearer wins: command line > environment > `--config` file > what a cluster manager tells > default. What stands
in the file is handed on as the words that the command line would hold, letter by letter (`0.10` stays `0.10`):

    version: 1                  # may be left out
    script: train.py            # a file or, with module: true, a module
    args: [--lr, 0.1]
    worker_num: 4               # any option, spelled a_b or a-b; paths count from where msrun is started
    preload: [torch, numpy]     # a repeatable option
    env: {NAME: value}

Only the tree of its nodes is read and nothing is constructed: tags can do nothing, and aliases, which multiply, are
refused. And TlsSpec: how the connections between hosts and scheduler are encrypted, from a JSON file with MindSpore's
keys, which has a folder that its paths count from:

    {"server_cert_path": "server.pem", "client_cert_path": "client.pem", "ca_cert_path": "ca.crt", "crl_path": "",
     "cipher_list": "ECDHE-ECDSA-AES256-GCM-SHA384", "cert_expire_warning_time_in_day": 90}

Ours are `server_password_file`, `client_password_file` and `server_name`. Source: MindSpore's dynamic cluster,
"Security"; ps/constants.h for the cipher suites and the limits."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from functools import cache
from typing import Any, NoReturn

from msrun import contract
from msrun.errors import UsageError, near_miss
from msrun.planning.record import Record
from ranktable.bounded_text import TextError, compose_yaml, load_json


def check_private(mode: int, place: str, path: object) -> None:
    """Refuse a file of `st_mode` mode that others may read or write (UsageError); `place` is what names it."""
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"{place}: others may read it (mode {stat.S_IMODE(mode):04o}); chmod 600 {path}")


SERVER_PASSWORD_VARIABLE = "MSRUN_TLS_SERVER_PASSWORD"  # noqa: S105 - the name of a variable
CLIENT_PASSWORD_VARIABLE = "MSRUN_TLS_CLIENT_PASSWORD"  # noqa: S105 - the name of a variable
PSK_CIPHER = "ECDHE-PSK-CHACHA20-POLY1305"  # on MindSpore's list, but goes with a shared key, not certificates
CIPHERS = (  # of TLS 1.2, as MindSpore allows them, strongest first; TLS 1.3 has three of its own
    "ECDHE-ECDSA-AES256-GCM-SHA384",
    "ECDHE-RSA-AES256-GCM-SHA384",
    "ECDHE-ECDSA-CHACHA20-POLY1305",
    "ECDHE-RSA-CHACHA20-POLY1305",
    "ECDHE-ECDSA-AES128-GCM-SHA256",
    "ECDHE-RSA-AES128-GCM-SHA256",
    "ECDHE-ECDSA-AES256-CCM",
    "ECDHE-ECDSA-AES128-CCM",
)
WARNING_DAYS = 90
MIN_WARNING_DAYS, MAX_WARNING_DAYS = 7, 180
SHOWN_CIPHERS = 3
PATH_KEYS = (
    *("server_cert_path", "client_cert_path", "ca_cert_path", "crl_path"),
    *("server_password_file", "client_password_file"),
)
DAYS_KEY = "cert_expire_warning_time_in_day"
OTHER_KEYS = ("cipher_list", DAYS_KEY, "server_name")
MINDSPORE_KEYS = ("recovery", "connection_num", "cert_check_interval_in_hour")
"""What else a file of MindSpore's may hold; it has no meaning here."""
PASSWORD_KEYS = ("server_password", "client_password", "password")


class TlsSpec(Record, kw_only=True):
    """What the user asked for; none of the files it names was read."""

    source: str  # the path as given with --tls_config, for messages
    client_cert_path: str  # certificate and key of this host. All paths are absolute
    ca_cert_path: str
    server_cert_path: str = ""  # certificate and key of the scheduler; may be empty on hosts without it
    crl_path: str = ""
    ciphers: tuple[str, ...] = CIPHERS
    warning_days: int = WARNING_DAYS
    server_name: str = ""  # whom the scheduler's certificate has to be for; empty = the CA is enough
    server_password_file: str = ""
    client_password_file: str = ""
    server_password: str = field(default="", repr=False)  # from the environment; wins over the file
    client_password: str = field(default="", repr=False)

    def place(self, key: str) -> str:
        return f"--tls_config {self.source}: {key} {getattr(self, key)}"


def parse_tls_config(text: str, source: str, folder: str, environ: Mapping[str, str]) -> TlsSpec:
    """Read the file of --tls_config (UsageError); `folder`: where its paths count from; `environ`: for passwords."""
    values = _load(text, source)
    found = {}
    for key in (*PATH_KEYS, "cipher_list", "server_name"):
        value = values.get(key)
        if not isinstance(value, str | None) or "\0" in (value or ""):
            _fail(source, f"{key}: {json.dumps(value)[:80]} is no text; give it in quotes")
        found[key] = str(value or "")
    paths = {key: os.path.join(folder, found[key]) if found[key] else "" for key in PATH_KEYS}  # noqa: PTH118 - pure
    for key in ("client_cert_path", "ca_cert_path"):
        if not paths[key]:
            _fail(source, f"{key}: is missing; both sides prove who they are, so every host needs it")
    days = values.get(DAYS_KEY, WARNING_DAYS)
    if type(days) is not int or not MIN_WARNING_DAYS <= days <= MAX_WARNING_DAYS:
        shown = json.dumps(days)[:80]
        _fail(source, f"{DAYS_KEY}: {shown}: must be {MIN_WARNING_DAYS} to {MAX_WARNING_DAYS} days")
    return TlsSpec(
        source=source,
        **paths,
        ciphers=_ciphers(list(dict.fromkeys(filter(None, found["cipher_list"].split(":")))), source),
        warning_days=days,
        server_name=found["server_name"],
        server_password=environ.get(SERVER_PASSWORD_VARIABLE, ""),
        client_password=environ.get(CLIENT_PASSWORD_VARIABLE, ""),
    )


def _fail(source: str, message: str) -> NoReturn:
    raise UsageError(f"--tls_config {source}: {message}")


def _load(text: str, source: str) -> dict[str, Any]:
    if not text.strip():
        _fail(source, "is empty; give JSON with client_cert_path, ca_cert_path and so on")
    try:
        value = load_json(text)
    except TextError as error:
        _fail(source, str(error))
    if not isinstance(value, dict):
        _fail(source, 'is no JSON object; give {"ca_cert_path": "ca.crt", ...}')
    known = [*PATH_KEYS, *OTHER_KEYS]
    for key in value:
        if key in PASSWORD_KEYS:
            _fail(
                source,
                f"{key}: no password belongs into this file; set {SERVER_PASSWORD_VARIABLE} and "
                f"{CLIENT_PASSWORD_VARIABLE}, or name files with server_password_file and client_password_file",
            )
        if key not in (*known, *MINDSPORE_KEYS):
            _fail(source, f"{key!r}: no such key{near_miss(key, known)}; there are {', '.join(known)}")
    return value


def _ciphers(names: Sequence[str], source: str) -> tuple[str, ...]:
    wrong = [name for name in names if name not in (*CIPHERS, PSK_CIPHER)]
    if wrong:
        shown = ", ".join(f"{name!r}{near_miss(name, CIPHERS, cutoff=0.95)}" for name in wrong[:SHOWN_CIPHERS])
        more = f" and {len(wrong) - SHOWN_CIPHERS} more" if len(wrong) > SHOWN_CIPHERS else ""
        _fail(
            source,
            f"cipher_list: {shown}{more}: not allowed, by MindSpore neither; leave cipher_list out to have all "
            f"that are, or give some of {':'.join(CIPHERS)}",
        )
    if names == [PSK_CIPHER]:
        _fail(source, f"cipher_list: {PSK_CIPHER} alone cannot be used with certificates; add {CIPHERS[0]}")
    return tuple(name for name in names if name != PSK_CIPHER) or CIPHERS


OF_LAUNCHER = (
    r"(PMI_|PMIX_(?!MCA_)|PRTE_(?!MCA_)|OMPI_COMM_WORLD_|OMPI_WORLD_|OMPI_MCA_orte_|OMPI_MCA_ess_base_|PET_RDZV_)\w+\Z"
    r"|OMPI_(APP_CTX_NUM_PROCS|ARGV|COMMAND|FILE_LOCATION|FIRST_RANKS|NUM_APP_CTX|TOOL_NAME|UNIVERSE_SIZE)\Z"
    r"|OMPI_MCA_(ess|initial_wdir|num_procs|pmix)\Z"
    r"|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT)\Z"
)


TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")
COMMAND_LINE = "command line"
VARIABLE_PREFIX = "MSRUN_"
TOKEN_VARIABLE = "MSRUN_TOKEN"  # noqa: S105 - the name of a variable, not a token
"""The secret by which the hosts of a job meet."""
SECRET_VARIABLES = (TOKEN_VARIABLE, SERVER_PASSWORD_VARIABLE, CLIENT_PASSWORD_VARIABLE)
"""For msrun alone: workers do not get them."""
MISSPELLED = 0.8  # how close a variable must be to ours to be one: others may have this prefix, too


def read_truth(word: str) -> bool:
    """Turn a word for true or false, in the spellings that people use, into it (ValueError)."""
    return (FALSE_WORDS + TRUE_WORDS).index(word.lower()) >= len(FALSE_WORDS)


class Setting(Record):
    """A value that is not a default, and where it came from; to be shown, so secrets are hidden in it."""

    name: str
    value: Any
    source: str  # `command line`, the name of a variable, or the path of a file

    @property
    def text(self) -> str:
        values = self.value if isinstance(self.value, list) else [self.value]
        return " ".join(_plain(value) for value in values).replace("\n", "\\n").replace("\r", "\\r")


class FoundSetting(Setting):
    """One that a cluster manager or another launcher has told; said at the start, in a line of its own."""


def _plain(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return shlex.quote(text) if any(letter.isspace() for letter in text) else text


KINDS = {  # type of a field -> what its option takes
    "int": "whole number",
    "float": "number",
    "bool": "truth value",
    "str": "text",
    "Path | None": "path",
    "tuple[str, ...]": "text",
    "tuple[Path, ...]": "path",
}
_MAX = 1e9


class Option(Record, kw_only=True):
    """A setting as it is asked for: --name, MSRUN_<NAME>, `name:` in a --config file, and its line in --help."""

    name: str
    shown: str  # the word for its value in --help: ` N`, or `[=json]` for one that may be left out; empty for a switch
    help: str
    kind: str = "text"  # what it takes: one of `KINDS`, `word` for one of `choices`, or a kind of its own
    default: Any = None
    alone: str = ""  # what it means without a value; empty = it takes the word after it
    choices: tuple[str, ...] = ()
    is_repeatable: bool = False
    least: float = 0
    most: float = _MAX
    must: str = ""  # the range, with what to do, in words; empty = any number is taken
    parse: Callable[[Any], Any] | None = None  # from what the command line has to what the spec has


def make_option(name: str, text: str, **settings: Any) -> Option:
    """Return an option. `text`: for --help: the word for its value, two blanks, what it does; a switch: that alone."""
    word, what = text.split("  ", 1) if "  " in text else ("", text)
    may_be_alone = not word or word.startswith(("=", "[="))
    usual = {
        "kind": "word" if "choices" in settings else "text" if word else "truth value",
        "alone": "true" if may_be_alone else "",
        "default": None if word else False,
    }
    return Option(name=name, shown=word if may_be_alone else f" {word}", help=what, **{**usual, **settings})


def option(default: Any, text: str, **settings: Any) -> Any:
    """Return a field of a spec with its option, see `make_option`; `asked`: the default that the command line has."""
    return field(default=default, metadata={"text": text, "settings": {"asked": default, **settings}})


@cache
def field_options(spec: type) -> dict[str, Option]:
    """Return name of a field -> option, for those of a spec that have one."""
    found = {}
    for one in fields(spec):
        if one.metadata:
            kind, settings = str(one.type), dict(one.metadata["settings"])
            is_repeatable, asked = kind in ("tuple[str, ...]", "tuple[Path, ...]"), settings.pop("asked")
            usual = {"name": one.name.removesuffix("_s"), "default": None if is_repeatable else asked}
            usual |= {"kind": KINDS[kind]} if kind in KINDS else {}
            given = {**usual, "is_repeatable": is_repeatable, **settings}
            found[one.name] = make_option(text=one.metadata["text"], **given)
    return found


def check_ranges(spec: Any) -> None:
    for name, one in field_options(spec.__class__).items():
        value = getattr(spec, name)
        if one.must and not one.least <= value <= one.most:
            raise UsageError(f"--{one.name} {_plain(value)}: must be {one.must}")


def refuse_together(given: Collection[str], exclusive: Iterable[tuple[str, str, str]]) -> None:
    """Refuse options of which one takes away the other's meaning (UsageError); the third of a row is why."""
    for first, second, why in exclusive:
        if first in given and second in given:
            raise UsageError(f"--{first} and --{second}: {why}")


def option_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return option -> value of every MSRUN_<OPTION> (UsageError: one misspelled); of a worker's own job none."""
    known = {variable_name(name): name for name in names}
    others = {*SECRET_VARIABLES, *contract.WORKER_SETTINGS}
    found = {}
    for variable, value in environ.items():
        is_ours = variable.startswith(VARIABLE_PREFIX)
        if not is_ours or (contract.MSRUN_JOB_ID in environ and variable in contract.JOB_VARIABLES):
            continue
        if variable in known and value:
            found[known[variable]] = value
        elif variable not in contract.JOB_VARIABLES | others | known.keys():
            bare = [name.removeprefix(VARIABLE_PREFIX) for name in (*known, *others)]  # all have the prefix in common
            hint = near_miss(variable.removeprefix(VARIABLE_PREFIX), bare, cutoff=MISSPELLED)
            if hint:
                hint = hint.replace("mean ", f"mean {VARIABLE_PREFIX}")
                raise UsageError(f"{variable}: no such setting{hint}; correct the variable or unset it")
    return found


def variable_name(option_name: str) -> str:
    """Return the environment variable of an option: `MSRUN_GRACE` for `grace`."""
    return VARIABLE_PREFIX + option_name.upper()


def without_option_variables(environ: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return what workers inherit: no settings of this msrun, nor its place in mpirun's, PMI's or torchrun's job."""
    settings = {*SECRET_VARIABLES, *map(variable_name, names)} - contract.WORKER_SETTINGS
    if contract.MSRUN_JOB_ID in environ:
        settings -= contract.JOB_VARIABLES
    return {name: value for name, value in environ.items() if name not in settings and not re.match(OF_LAUNCHER, name)}


def settings_note(settings: Iterable[Setting]) -> list[str]:
    """Return one line about what was set elsewhere than on the command line, or nothing."""
    elsewhere = (one for one in settings if not isinstance(one, FoundSetting) and one.source != COMMAND_LINE)
    shown = [f"{one.name}={one.text} ({one.source})" for one in elsewhere]
    return [f"settings: {', '.join(shown)}"] if shown else []


# -- the file of --config --------------------------------------------------------------------------------------------

VERSION = "1"
MAX_SHOWN_CHARS = 60
MAX_DEPTH = 16  # a job needs two levels; YAML readers call themselves for every further one

_YAML = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(("bool", "int", "float", "str", "timestamp", "value"))
_SINGLE, _LIST, _MAPPING = "scalar", "sequence", "mapping"
_REMEDY = {_SINGLE: "a single value", _LIST: "a list such as [a, b]", _MAPPING: "{NAME: value}"}
_OWN = {"version": _SINGLE, "script": _SINGLE, "module": _SINGLE, "args": _LIST, "env": _MAPPING}
"""What the file holds beside options -> its form."""


class JobConfig(Record):
    """A file of settings, as the words that the command line would hold."""

    source: str
    options: Mapping[str, str | list[str]] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    env: tuple[tuple[str, str], ...] = ()
    program: tuple[str, ...] = ()
    is_module: bool = False

    def place(self, name: str) -> str:
        return f"--config {self.source}, line {self.lines[name]}: {name}"


class _Wrong(Exception):
    """What is wrong, and in which line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}")


def parse_config(text: str, source: str, options: Mapping[str, Option]) -> JobConfig:
    """Read a file of settings at `source`, which may hold these options (UsageError)."""
    try:
        return _read_config(compose_yaml(text, max_depth=MAX_DEPTH), source, options)
    except TextError as error:
        raise UsageError(f"--config {source}, line {error.line or 1}: {error.problem}; {error.remedy}") from None
    except _Wrong as error:
        raise UsageError(f"--config {source}, {error}") from None


def _read_config(root: Any, source: str, options: Mapping[str, Option]) -> JobConfig:
    forms = {name: _LIST if one.is_repeatable else _SINGLE for name, one in options.items()} | _OWN
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for name, line, node in _entries(root, "the file", lines) if root is not None else ():
        if name == "config":
            raise _Wrong(line, "config: a file cannot name another one; give --config on the command line")
        if name not in forms:
            raise _Wrong(line, f"{name}: no such setting{near_miss(name, forms)}; msrun --help lists the options")
        if node.id == _MAPPING and name in options and options[name].kind == "JSON":
            values[name] = json.dumps(_value(name, line, node, _MAPPING, is_nested=True))
        else:
            values[name] = _value(name, line, node, forms[name])
    if values.get("version", VERSION) != VERSION:
        what = f"version {values['version']}: this msrun reads version {VERSION}"
        raise _Wrong(lines["version"], f"{what}; change the file or msrun")
    if alone := next((name for name in ("args", "module") if name in values and "script" not in values), ""):
        raise _Wrong(lines[alone], f"{alone}: there is no script that it belongs to; add script: train.py")
    module = values.get("module", "no")
    if module.lower() not in TRUE_WORDS + FALSE_WORDS:
        raise _Wrong(lines["module"], f"module: {module!r}: give true or false")
    return JobConfig(
        source=source,
        options={name: value for name, value in values.items() if name in options},
        lines=lines,
        env=tuple(values.get("env", {}).items()),
        program=(values["script"], *values.get("args", ())) if "script" in values else (),
        is_module=read_truth(module),
    )


def _entries(node: Any, what: str, lines: dict[str, int] | None = None) -> Iterator[tuple[str, int, Any]]:
    """Yield name, line and value of a mapping, each name once; `lines`: of options, a_b or a-b, filled with theirs."""
    if node.id != _MAPPING:
        raise _Wrong(_line(node), f"{what}: {_found(node)}; give lines of NAME: value")
    seen: dict[str, int] = {} if lines is None else lines
    for name_node, value_node in node.value:
        line = _line(name_node)
        if name_node.id != _SINGLE or name_node.tag == _YAML + "merge":
            raise _Wrong(line, f"{what}: {_found(name_node)} instead of a name; give NAME: value")
        name = name_node.value if lines is None else name_node.value.replace("-", "_")
        if name in seen:
            raise _Wrong(line, f"{name}: given twice, first in line {seen[name]}; keep one")
        seen[name] = line
        yield name, line, value_node


def _value(key: str, line: int, node: Any, form: str, *, is_nested: bool = False) -> Any:
    """Return a node of this form, its single values as they are written: the command line's own readers decide whether
    they will do. `is_nested`: what a mapping or list holds may be one, too."""
    tag = node.tag.removeprefix(_YAML)
    if node.id != form or (form == _SINGLE and tag not in _SCALAR_TAGS):
        remedy = ", '' for an empty one" if tag == "null" and form == _SINGLE else ""
        raise _Wrong(line, f"{key}: {_found(node)}; give {_REMEDY[form]}{remedy}")
    if form == _MAPPING:
        return {
            name: _value(f"{key} {name}", at, one, one.id if is_nested else _SINGLE, is_nested=is_nested)
            for name, at, one in _entries(node, key)
        }
    if form == _LIST:
        return [
            _value(key, _line(one), one, one.id if is_nested else _SINGLE, is_nested=is_nested) for one in node.value
        ]
    if "\0" in node.value or any("\ud800" <= letter <= "\udfff" for letter in node.value):  # half of a pair
        raise _Wrong(line, f"{key}: holds a character that no command line can; remove it")
    return str(node.value)


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1 if node.start_mark is not None else 1


def _found(node: Any) -> str:
    tag = node.tag.removeprefix(_YAML)
    if node.id != _SINGLE:
        return "a list" if node.id == _LIST else "a mapping"
    if tag not in _SCALAR_TAGS:
        return {"null": "no value", "merge": "a merge key (<<)"}.get(tag, f"the tag {tag}")
    text = node.value if len(node.value) <= MAX_SHOWN_CHARS else node.value[:MAX_SHOWN_CHARS] + "..."
    return f"{text!r} is {'a truth value' if tag == 'bool' else 'a number' if tag in ('int', 'float') else 'text'}"

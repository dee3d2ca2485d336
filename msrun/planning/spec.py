"""LaunchSpec: what the user asked for, checked for everything that needs no look at the machine."""

from __future__ import annotations

import ipaddress
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from msrun import contract
from msrun.errors import UsageError, near_miss
from msrun.planning.host_assignment import HostAssignment
from msrun.planning.hosts.forwarded import check_patterns
from msrun.planning.hosts.host_entry import HostEntry, blamed_on
from msrun.planning.placement.bind_options import CoreBinding
from msrun.planning.placement.host import DeviceTarget
from msrun.planning.program import MindSporeKind, MindSporeSemantics, Program, StartMethod
from msrun.planning.settings import Setting
from msrun.planning.tls_spec import TlsSpec
from ranktable.hosts.brackets import shorten
from ranktable.hosts.host_list import MAX_PORT, check_user
from ranktable.hosts.ranges import RangeError, read_range

MAX_STATUS = 255
_NO_TESTS = 5
"""Of pytest (its reference, "Exit codes")."""


def parse_statuses(option: str, text: str) -> tuple[int, ...]:
    """Turn `137,SIGTERM,HUP` into exit statuses; a signal is 128 + its number, as msrun ends after it.

    Raises:
        UsageError: neither a status from 1 to 255 nor the name of a signal.
    """
    return tuple(dict.fromkeys(_parse_status(option, text, piece.strip()) for piece in text.split(","))) if text else ()


def _parse_status(option: str, text: str, word: str) -> int:
    name = f"SIG{word.upper().removeprefix('SIG')}"
    if name in signal.Signals.__members__:
        return 128 + signal.Signals[name]
    if word.isascii() and word.isdigit() and len(word) <= len(str(MAX_STATUS)) and 0 < int(word) <= MAX_STATUS:
        return int(word)
    raise UsageError(
        f"{option} {text}: {word!r} is neither an exit status from 1 to {MAX_STATUS} nor a signal; "
        "give a list such as 75,137,SIGTERM"
    )


def check_statuses(restart_on: tuple[int, ...], no_restart_on: tuple[int, ...], max_restarts: int) -> None:
    """Refuse lists that contradict each other, or that nothing asks.

    Raises:
        UsageError: one of both.
    """
    if both := sorted({*restart_on} & {*no_restart_on}):
        raise UsageError(f"--restart_on and --no_restart_on: both name {both[0]}; give it in one of the two")
    if restart_on and not max_restarts:
        raise UsageError("--restart_on: starts nothing again with --max_restarts 0; give --max_restarts 1 or more")


def explain_no_tests(program: Program, exit_code: int) -> str:
    """Return why pytest has failed though the file that it was given ran to its end; empty when that is not why."""
    if exit_code != _NO_TESTS or (program.kind, program.target) != ("module", "pytest"):
        return ""
    return "pytest found no test there; it had run the file to look for some: name it to msrun without pytest"


MIN_LOG_BYTES = 4096
"""A smaller file would be exchanged at almost every line."""
MAX_LOG_KEEP = 1000

_SIZE = re.compile(r"([0-9]+)\s*([KMGT]?)(?:I?B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(option: str, text: str) -> int:
    """Turn `100M`, `1G`, `64KiB` or plain bytes into bytes; units are powers of 1024.

    Raises:
        UsageError: not such a size.
    """
    match = _SIZE.match(text.strip())
    if not match:
        raise UsageError(f"{option} {text}: not a size; give bytes, or a whole number with K, M, G or T such as 100M")
    return int(match[1]) * _UNITS[match[2].upper()]


def format_size(size_bytes: int) -> str:
    """Return a size with the largest unit that leaves it whole: `100 MiB`, `1500 bytes`."""
    for unit in ("T", "G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]} {unit}iB"
    return f"{size_bytes} bytes"


def check_log_rotation(max_bytes: int, keep: int) -> None:
    """Refuse what cannot be done.

    Raises:
        UsageError: naming the option, its value, the constraint and the remedy.
    """
    if max_bytes < 0 or 0 < max_bytes < MIN_LOG_BYTES:
        raise UsageError(
            f"--log_max_bytes {max_bytes}: must be {MIN_LOG_BYTES} bytes or more, e.g. 100M; 0 never rotates"
        )
    if not 1 <= keep <= MAX_LOG_KEEP:
        raise UsageError(
            f"--log_keep {keep}: must be 1 to {MAX_LOG_KEEP} older files per worker; "
            "to keep everything in one file leave --log_max_bytes out"
        )


HostKeyPolicy = Literal["strict", "accept-new", "off"]
HOST_KEY_POLICIES: tuple[HostKeyPolicy, ...] = ("strict", "accept-new", "off")
SshClientName = Literal["auto", "openssh", "paramiko"]
SSH_CLIENTS: tuple[SshClientName, ...] = ("auto", "openssh", "paramiko")
NO_CONFIG = "none"
"""In place of a file: no ssh_config is read; ssh -F has the same word."""
CONNECT_TIME_OUT_S = 30.0
WINDOW = 32
MAX_WINDOW = 1024
MAX_CONNECT_TIME_OUT_S = 3600.0


@dataclass(frozen=True)
class SshSettings:
    """What holds for all hosts; what a host list says of one host wins, ssh_config fills in the rest."""

    config_file: Path | None = None
    """Read in place of ~/.ssh/config and /etc/ssh/ssh_config; `NO_CONFIG` for none."""
    user: str = ""
    port: int = 0
    """0 = that of ssh_config, else 22."""
    identity_files: tuple[Path, ...] = ()
    """Private keys: these, and those that ssh_config names, are tried, and no others."""
    host_keys: HostKeyPolicy | None = None
    """What to do with the host key of an unknown host; None = as ssh_config says, else strict."""
    connect_time_out_s: float = CONNECT_TIME_OUT_S
    """For one host, from its name to its agent, with all tries."""
    window: int = WINDOW
    """How many hosts are being connected at a time."""
    client: SshClientName = "auto"
    """openssh = the system's ssh, auto = paramiko where there is none."""


def check_ssh_settings(settings: SshSettings) -> None:
    """Refuse what can be seen to be wrong in the words alone.

    Raises:
        UsageError: naming the option, its value, the constraint and the remedy.
    """
    if settings.user:
        with blamed_on():
            check_user(settings.user, "--ssh_user")
    if not 0 <= settings.port <= MAX_PORT:
        raise UsageError(f"--ssh_port {settings.port}: must be 1 to {MAX_PORT}; leave it out for that of ssh_config")
    if not 0 < settings.connect_time_out_s <= MAX_CONNECT_TIME_OUT_S:
        raise UsageError(
            f"--ssh_connect_time_out {settings.connect_time_out_s:g}: "
            f"must be more than 0 and up to {MAX_CONNECT_TIME_OUT_S:g} seconds"
        )
    if not 1 <= settings.window <= MAX_WINDOW:
        raise UsageError(f"--ssh_window {settings.window}: must be 1 to {MAX_WINDOW} hosts at a time")


_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*\Z|::1\Z")
_LOG_STEM = re.compile(r"[A-Za-z0-9._{}-]+\Z")
_PLACEHOLDERS = ("{ip}", "{hostname}")
MAX_SECONDS = 1e9
MEETING_PORT = 8118
"""Where several hosts meet when no port is given: MindSpore's default."""
MIN_HEARTBEAT_S = 1.0
WARM_TIME_S = 600.0
FORWARDABLE = ("USR1", "USR2", "WINCH", "URG", "CONT", "ALRM", "VTALRM", "PROF", "IO")
"""Signals that msrun may pass on to workers; the others end msrun, or belong to it."""


@dataclass(frozen=True, kw_only=True)
class JobTerms:
    """What is asked of a job and holds for all of it: the same in the spec and in the plan."""

    cluster_time_out_s: int = 600
    """How long all workers may take to start; negative = for ever."""
    grace_s: float = 10.0
    """Seconds between TERM and KILL."""
    forward_signals: tuple[int, ...] = (int(signal.SIGUSR1), int(signal.SIGUSR2))
    """Passed on to the workers; they do not end the job."""
    hang_time_out_s: float = 0.0
    """How long the job may go without any progress; 0 = for ever."""
    exit_time_out_s: float = contract.DEFAULT_EXIT_TIME_OUT_S
    """How long a worker may take to end, without a sign of life, once its program has ended; 0 = no limit."""
    keep_going: bool = False
    """Whether the other ranks go on when one has failed; the job fails when all have ended."""
    time_limit_s: float = 0.0
    """How long the job may run, with all its attempts; 0 = for ever."""
    max_restarts: int = 0
    """How often the whole job is started again after a failure."""
    restart_on: tuple[int, ...] = ()
    """Exit statuses after which alone, and always, it is; empty = after all but some."""
    no_restart_on: tuple[int, ...] = ()
    """Those after which it never is."""
    log_max_bytes: int = 0
    """Size at which a worker's log is exchanged for a new one; 0 = never."""
    log_keep: int = 5
    """How many older files of each log stay."""
    tail_ranks: tuple[int, ...] = field(default=(0,))
    """Global ranks whose log is copied to the console."""
    interactive_rank: int | None = None
    """The global rank that standard input, and the terminal where there is one, belongs to; None = to none."""
    settings: tuple[Setting, ...] = ()
    """What is not a default, and where it came from; to be shown only."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(JobTerms):
    """One `msrun` command, translated once by the command line. Every field was checked by `check_spec`."""

    program: Program
    worker_num: int
    """World size: workers over all hosts."""
    local_worker_num: int
    """Workers on this host."""
    script_source: str = field(default="", repr=False)
    """Of a script that can be read only once, for which `program.target` is - until a job has written it."""
    working_directory: Path
    """Absolute; every worker starts in it."""
    log_dir: Path
    """Absolute; logs, plan and events of the job."""
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    """Port on the master, of the store or, with several hosts, of the scheduler; 0 = a free one, or MEETING_PORT."""
    node_rank: int = -1
    """Index of this host; -1 = not given."""
    server_num: int = 0
    """Parameter servers beside the workers, on the one host of the job."""
    start_method: StartMethod = "auto"
    mindspore: MindSporeKind = "auto"
    """Which `mindspore` the workers import: MindSpore itself, msrun.mindspore, or whatever Python finds (none)."""
    mindspore_semantics: MindSporeSemantics = "mindspore"
    """What defaults mean in scripts of msrun.mindspore."""
    device_target: DeviceTarget = "auto"
    virtual_local_rank: bool = False
    """Whether each worker sees its device alone, as number 0, and LOCAL_RANK is 0 for all."""
    is_warm: bool = False
    """Whether the job starts from a warm server, and leaves one."""
    warm_time_s: float = WARM_TIME_S
    """Seconds for which a warm server waits for the next job."""
    preload: tuple[str, ...] = ()
    """Modules that the fork server imports beside the script's own."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables set for every worker."""
    rank_table_file: Path | None = None
    worker_log_name: str = "worker"
    splits_logs: bool = False
    """Whether each worker's stderr has a log of its own."""
    log_keep_jobs: int = 10
    """How many jobs stay in the log directory, with this one."""
    has_terminal: bool = False
    """With `interactive_rank`: whether the user's standard input is a terminal."""
    is_raw_tail: bool = False
    """Copied byte for byte, with the control sequences in it."""
    has_times: bool = False
    """Whether lines of workers are shown with the time."""
    merges_lines: bool = False
    """Whether a line that all workers that are shown write is shown once."""
    has_progress_line: bool = False
    """Whether a terminal shows how far the first rank is."""
    has_trace: bool = False
    """Whether workers write down when their steps and their waits in collectives begin and end."""
    metrics_file: Path | None = None
    """Where the launcher writes the job in numbers, for Prometheus."""
    bind_core: CoreBinding | None = None
    """Which processors each worker gets; None = all."""
    bind_numa: bool = False
    """Whether each worker stays on one NUMA node, its memory included."""
    token: str = field(default="", repr=False)
    """What the hosts of a job of several know each other by; empty = none was given."""
    is_under_scheduler: bool = False
    """Whether a cluster manager has started msrun on each host: its network is taken as the job's own."""
    server_token: str = field(default="", repr=False)
    """What workers and parameter servers of all hosts know each other by; empty = none was made yet."""
    heartbeat_time_out_s: float = 15.0
    """How long a host of a job of several may give no sign of life."""
    tls: TlsSpec | None = None
    """How the hosts of a job of several encrypt what they and the scheduler say; None = not at all."""
    table_hosts: tuple[HostAssignment, ...] = ()
    """The hosts of a rank table, in the order of their node_rank; one is this host, unless there are `host_entries`.
    Of an ordinary job on one host also that host, when it was given with its devices."""
    worker_log_dir: Path | None = None
    """Where the workers' logs go when it is not log_dir: to the launcher's log directory, which this host shares."""
    host_entries: tuple[HostEntry, ...] = ()
    """The hosts that this command starts the job on, in the order of their node_rank; empty = it runs on this host."""
    spares: tuple[HostEntry, ...] = ()
    """Hosts that take the place of lost ones."""
    min_hosts: int = 0
    """How few hosts may run the job when some are lost; 0 = the job ends when it loses one."""
    join_window_s: float = 30.0
    """How long more hosts may take to come by themselves once `min_hosts` have."""
    rescale_now: bool = False
    """Whether the job starts again at once for a host that has come while it runs; else it is used from the next
    restart on."""
    first_attempt: int = 0
    """How often the job was started before, on other hosts."""
    forward_env: tuple[str, ...] = ()
    """Patterns of names: variables that go to these hosts beside those that always do, see `hosts.forwarded`."""
    ship: bool = False
    """Whether msrun's own code is sent to these hosts."""
    ssh: SshSettings = field(default_factory=SshSettings)
    """How they are reached."""
    stands_for: HostEntry | None = None
    """The host of a rehearsal that this process is the agent of."""

    @property
    def is_remote(self) -> bool:
        """Whether this command starts agents on hosts and runs no worker itself; `local_worker_num` is 0 then."""
        return bool(self.host_entries)

    @property
    def is_joined(self) -> bool:
        """Whether these hosts have come by themselves: msrun was started on each, and this one has the scheduler."""
        return any(entry.has_come for entry in self.host_entries)

    @property
    def is_rehearsal(self) -> bool:
        """Whether these agents all run on this machine."""
        return any(entry.is_rehearsed for entry in self.host_entries)

    @property
    def is_several(self) -> bool:
        """Whether this host is one of several, on each of which msrun is started."""
        return not self.is_remote and self.local_worker_num < self.worker_num

    @property
    def own_device_ids(self) -> tuple[int, ...]:
        """The devices that the rank table, or a host list, gives this host; empty when they are not given."""
        own = (assignment for assignment in self.table_hosts if assignment.node_rank == max(self.node_rank, 0))
        return next((assignment.device_ids for assignment in own), ())

    @property
    def meeting_port(self) -> int:
        """Port on which several hosts meet."""
        return self.master_port or MEETING_PORT


def check_spec(spec: LaunchSpec) -> None:
    """Refuse what can be seen to be wrong in the words alone.

    Raises:
        UsageError: naming the option, its value, the constraint and the remedy.
    """
    _check_counts(spec)
    _check_address(spec)
    for name, value in spec.env:
        check_env(name, value)
    check_patterns(spec.forward_env)
    check_ssh_settings(spec.ssh)
    _check_logs(spec)
    if not 0 <= spec.join_window_s < MAX_SECONDS:
        raise UsageError(
            f"--join_window {spec.join_window_s:g}: must be 0 or more seconds, and less than {MAX_SECONDS:g}"
        )
    _check_min_hosts(spec)
    if spec.grace_s < 0:
        raise UsageError(f"--grace {spec.grace_s:g}: must be 0 or more seconds; 0 kills at once")
    if not 0 <= spec.hang_time_out_s < MAX_SECONDS:
        raise UsageError(f"--hang_time_out {spec.hang_time_out_s:g}: must be 0 or more seconds; 0 = no limit")
    if not 0 <= spec.exit_time_out_s < MAX_SECONDS:
        raise UsageError(f"--exit_time_out {spec.exit_time_out_s:g}: must be 0 or more seconds; 0 = no limit")
    if not 0 <= spec.time_limit_s < MAX_SECONDS:
        raise UsageError(f"--time_limit {spec.time_limit_s:g}: must be 0 or more seconds; 0 = no limit")
    if spec.time_limit_s and signal.SIGALRM in spec.forward_signals:
        raise UsageError("--signals ALRM and --time_limit: msrun's own timer sends ALRM; leave it out of --signals")
    if not 0 < spec.warm_time_s < MAX_SECONDS:
        raise UsageError(f"--warm_time {spec.warm_time_s:g}: must be more than 0 seconds")
    if spec.max_restarts < 0:
        raise UsageError(f"--max_restarts {spec.max_restarts}: must be 0 or more; 0 = no restart")
    check_statuses(spec.restart_on, spec.no_restart_on, spec.max_restarts)
    if spec.server_num < 0:
        raise UsageError(f"--server_num {spec.server_num}: must be 0 or more; 0 = no parameter servers")
    if spec.server_num and spec.is_several and not spec.token:
        raise UsageError(
            f"--server_num {spec.server_num}: workers and parameter servers on several hosts know each other by the "
            "job's token: give --token_file or MSRUN_TOKEN on all hosts, or start the job with --hosts"
        )
    _check_interactive(spec)
    for rank in spec.tail_ranks:
        if not 0 <= rank < spec.worker_num:
            raise UsageError(
                f"--tail_worker_log {rank}: no such rank; the ranks of this job are 0 to {spec.worker_num - 1}"
            )


def _check_logs(spec: LaunchSpec) -> None:
    _check_log_name(spec.worker_log_name)
    check_server_logs(spec.worker_log_name, spec.server_num)
    check_log_rotation(spec.log_max_bytes, spec.log_keep)
    if spec.log_keep_jobs < 1:
        raise UsageError(f"--log_keep_jobs {spec.log_keep_jobs}: must be 1 or more jobs, with this one")
    if spec.splits_logs and spec.log_max_bytes:
        raise UsageError("--log_split and --log_max_bytes: a log that is rotated has both streams; give one of the two")
    asked = {"log_split": spec.splits_logs, "log_time": spec.has_times, "log_once": spec.merges_lines}
    for name in (name for name, is_asked in asked.items() if is_asked):
        if spec.interactive_rank is not None:
            raise UsageError(f"--{name} and --interactive: a rank's terminal shows all as it comes; give one")
        if spec.is_raw_tail and name != "log_split":
            raise UsageError(f"--{name} and --raw: that shows bytes, not lines; give one of the two")


def _check_interactive(spec: LaunchSpec) -> None:
    rank = spec.interactive_rank
    if rank is None:
        return
    if not 0 <= rank < spec.worker_num:
        raise UsageError(f"--interactive={rank}: no such rank; the ranks of this job are 0 to {spec.worker_num - 1}")
    if spec.is_several:
        raise UsageError(
            f"--interactive={rank}: not where msrun is started on each host, as each has a terminal of its own; start "
            "the job from one with --hosts"
        )


def _check_counts(spec: LaunchSpec) -> None:
    if spec.is_remote:
        _check_heartbeat(spec)
        return
    if spec.worker_num < 1:
        raise UsageError(
            f"--worker_num {spec.worker_num}: must be 1 or more; give the number of workers over all hosts"
        )
    if spec.local_worker_num < 1:
        raise UsageError(f"--local_worker_num {spec.local_worker_num}: must be 1 or more; leave it out on one host")
    if spec.local_worker_num > spec.worker_num:
        raise UsageError(
            f"--local_worker_num {spec.local_worker_num}: more than --worker_num {spec.worker_num}; "
            "a host cannot run more workers than the job has"
        )
    if spec.is_several:
        _check_several(spec)
    elif spec.node_rank not in (-1, 0):
        raise UsageError(f"--node_rank {spec.node_rank}: a job on one host has only node 0; leave it out")


def _check_min_hosts(spec: LaunchSpec) -> None:
    """Of hosts that come by themselves; those of a list were counted with it."""
    most = 1 + spec.worker_num - spec.local_worker_num  # this one, and others with a worker each
    if not spec.min_hosts or spec.is_remote:
        return
    if not spec.is_several:
        raise UsageError(f"--min_hosts {spec.min_hosts}: the job has one host; leave it out")
    if not 1 <= spec.min_hosts <= most:
        raise UsageError(
            f"--min_hosts {spec.min_hosts}: must be 1 to {most}, as many as --worker_num {spec.worker_num} and "
            f"--local_worker_num {spec.local_worker_num} allow"
        )


def _check_several(spec: LaunchSpec) -> None:
    is_asked = any(setting.name == "master_addr" for setting in spec.settings)  # several msruns on one machine
    if is_loopback(spec.master_addr) and not is_asked:
        raise UsageError(
            f"--local_worker_num {spec.local_worker_num}: less than --worker_num {spec.worker_num}, so the job has "
            f"several hosts, and others cannot reach --master_addr {spec.master_addr}; give the address of the host "
            "with the scheduler, or leave --local_worker_num out to use one host"
        )
    if spec.node_rank < -1:
        raise UsageError(f"--node_rank {spec.node_rank}: must be 0 or more; leave it out to number hosts by address")
    _check_heartbeat(spec)


def _check_heartbeat(spec: LaunchSpec) -> None:
    if not MIN_HEARTBEAT_S <= spec.heartbeat_time_out_s < MAX_SECONDS:
        raise UsageError(
            f"--heartbeat_time_out {spec.heartbeat_time_out_s:g}: must be {MIN_HEARTBEAT_S:g} or more seconds"
        )


def _check_address(spec: LaunchSpec) -> None:
    if not 0 <= spec.master_port <= MAX_PORT:
        raise UsageError(f"--master_port {spec.master_port}: must be 0 to {MAX_PORT}; 0 takes a free port")
    if not _HOST_NAME.match(spec.master_addr):
        raise UsageError(f"--master_addr {spec.master_addr!r}: not an address or host name; give e.g. 127.0.0.1")


def is_loopback(address: str) -> bool:
    """Return True for 127.0.0.0/8, ::1 and localhost."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def parse_signals(text: str) -> tuple[int, ...]:
    """Turn `USR1,SIGUSR2` or `none` into signal numbers.

    Raises:
        UsageError: no such signal, or one that cannot be passed on.
    """
    if text.strip().lower() in ("none", ""):
        return ()
    found: dict[int, None] = {}
    for piece in text.upper().split(","):
        name = piece.strip().removeprefix("SIG")
        if name not in FORWARDABLE:
            hint = "" if f"SIG{name}" in signal.Signals.__members__ else near_miss(name, FORWARDABLE)
            raise UsageError(
                f"--signals {text}: {piece.strip()} cannot be passed on{hint}; "
                f"give none or some of {', '.join(FORWARDABLE)}"
            )
        found[int(signal.Signals[f"SIG{name}"])] = None
    return tuple(found)


def check_env(name: str, value: str) -> None:
    """Refuse what cannot be an environment variable, and what is msrun's own to set."""
    if not _ENV_NAME.match(name):
        raise UsageError(f"--env {name!r}: not a variable name; letters, digits and _ only, not starting with a digit")
    if "\0" in value:
        raise UsageError(f"--env {name}: the value holds a NUL byte; an environment cannot carry it")
    if name in contract.RANK_VARIABLES or name in contract.JOB_VARIABLES:
        raise UsageError(f"--env {name}: msrun sets it for every worker; leave it out")


def _check_log_name(stem: str) -> None:
    bare = stem
    for placeholder in _PLACEHOLDERS:
        bare = bare.replace(placeholder, "")
    if not _LOG_STEM.match(stem) or "{" in bare or "}" in bare or stem in (".", ".."):
        raise UsageError(
            f"--worker_log_name {stem}: letters, digits, '.', '_', '-' and the words {{ip}} and {{hostname}} only"
        )


def check_server_logs(stem: str, server_num: int) -> None:
    """Refuse a name of workers' logs that is that of parameter servers' logs.

    Raises:
        UsageError: it is.
    """
    if server_num and contract.worker_log_name(stem, 0) == f"{contract.server_name(0)}.log":
        raise UsageError(
            f"--worker_log_name {stem}: the parameter servers of --server_num {server_num} have logs of this name; "
            "give another one"
        )


def parse_tail(text: str, worker_num: int, option: str = "--tail_worker_log") -> tuple[int, ...]:
    """Turn `all`, `none`, `-1` (MindSpore's all), `3`, `0,2` or `0-3,7` into ranks, in order, without repeats.

    Raises:
        UsageError: not such a list, or a rank that does not exist.
    """
    word = text.strip().lower()
    if word in ("all", "-1"):
        return tuple(range(worker_num))
    if word in ("none", ""):
        return ()
    ranks: dict[int, None] = {}
    place = f"{option} {shorten(text)}"
    for piece in word.split(","):
        try:
            ranks.update(dict.fromkeys(read_range("-".join(map(str.strip, piece.split("-"))), worker_num - 1).numbers))
        except RangeError as error:
            why = f"{shorten(piece)!r} is no rank; give all, none, or ranks such as 0,2-3"
            if error.reason != "form":
                why = f"{piece.strip()} is outside this job; its ranks are 0 to {worker_num - 1}"
            raise UsageError(f"{place}: {why}") from None
    return tuple(ranks)


def parse_env_file(text: str, source: str) -> tuple[tuple[str, str], ...]:
    """Read `NAME=value` lines; blank lines and lines that start with # are skipped, one pair of quotes is taken off.

    Raises:
        UsageError: naming file and line.
    """
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() would also break at form feeds and the like
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, sign, value = line.removeprefix("export ").partition("=")
        if not sign:
            raise UsageError(f"--env_file {source}, line {number}: {line!r} is not NAME=value")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        if not _ENV_NAME.match(name.strip()):
            raise UsageError(
                f"--env_file {source}, line {number}: {name.strip()!r} is not a variable name; "
                "letters, digits and _ only, not starting with a digit"
            )
        pairs.append((name.strip(), value))
    return tuple(pairs)


def parse_env(items: Sequence[str], current: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Turn `NAME=value`, or `NAME` alone (its value here), into pairs.

    Raises:
        UsageError: `NAME` alone that is not set here.
    """
    pairs: list[tuple[str, str]] = []
    for item in items:
        name, sign, value = item.partition("=")
        if not sign:
            if name not in current:
                raise UsageError(f"--env {name}: not set here; give --env {name}=VALUE")
            value = current[name]
        pairs.append((name, value))
    return tuple(pairs)

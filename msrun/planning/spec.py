"""LaunchSpec: what the user asked for, each setting declared once with its option; what needs no look at the machine
is checked here."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from msrun import contract
from msrun.errors import UsageError, near_miss
from msrun.planning.hosts import HostAssignment, HostEntry, blamed_on
from msrun.planning.masking import check_patterns
from msrun.planning.program import DeviceTarget, MindSporeKind, MindSporeSemantics, Program, StartMethod
from msrun.planning.record import Record
from msrun.planning.settings import Setting, TlsSpec, check_ranges, field_options, option, read_truth, refuse_together
from ranktable.hosts.brackets import shorten
from ranktable.hosts.host_list import MAX_PORT, check_user
from ranktable.hosts.ranges import RangeError, read_range

MAX_STATUS = 255
_NO_TESTS = 5  # of pytest (its reference, "Exit codes")
MIN_LOG_BYTES = 4096  # a file system frees no less
NO_CONFIG = "none"  # in place of a file: no ssh_config is read; ssh -F has the same word
MORE_THAN_0 = 1e-9
LOOPBACK = "127.0.0.1"  # where a job on one host meets
MEETING_PORT = 8118  # where several hosts meet when no port is given: MindSpore's default
FORWARDABLE = ("USR1", "USR2", "WINCH", "URG", "CONT", "ALRM", "VTALRM", "PROF", "IO")
"""Signals that msrun may pass on to workers; the others end msrun, or belong to it."""

_SIZE = r"(?i)([0-9]+)\s*([KMGT]?)(?:I?B)?\Z"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"
_HOST_NAME = r"[A-Za-z0-9][A-Za-z0-9.:_-]*\Z|::1\Z"
_LOG_STEM = r"[A-Za-z0-9._{}-]+\Z"


def parse_statuses(option: str, text: str) -> tuple[int, ...]:
    """Turn `137,SIGTERM,HUP` into exit statuses; a signal is 128 + its number, as msrun ends after it (UsageError)."""
    found = []
    for word in map(str.strip, text.split(",") if text else ()):
        name = f"SIG{word.upper().removeprefix('SIG')}"
        is_status = word.isascii() and word.isdigit() and len(word) <= len(str(MAX_STATUS))
        if name in signal.Signals.__members__:
            found.append(128 + signal.Signals[name])
        elif is_status and 0 < int(word) <= MAX_STATUS:
            found.append(int(word))
        else:
            raise UsageError(
                f"{option} {text}: {word!r} is neither an exit status from 1 to {MAX_STATUS} nor a signal; "
                "give a list such as 75,137,SIGTERM"
            )
    return tuple(dict.fromkeys(found))


def parse_size(option: str, text: str) -> int:
    """Turn `100M`, `1G`, `64KiB` or plain bytes into bytes; units are powers of 1024 (UsageError: not such a size)."""
    match = re.match(_SIZE, text.strip())
    if not match:
        raise UsageError(f"{option} {text}: not a size; give bytes, or a whole number with K, M, G or T such as 100M")
    return int(match[1]) * _UNITS[match[2].upper()]


def format_size(size_bytes: int) -> str:
    """Return a size with the largest unit that leaves it whole: `100 MiB`, `1500 bytes`."""
    unit = next((unit for unit in "TGMK" if size_bytes and size_bytes % _UNITS[unit] == 0), "")
    return f"{size_bytes // _UNITS[unit]} {unit}iB" if unit else f"{size_bytes} bytes"


SCHEDULER_KEY = "scheduler"
MAX_CPU = 1 << 16  # no kernel counts further (CONFIG_NR_CPUS); what is larger is a slip of the pen

_DEVICE_KEY = r"device(0|[1-9]\d{0,5})\Z"
_EXAMPLE = """{"device0": ["0-3", "8"], "device1": ["4-7"]}"""


class CoreBinding(Record):
    """What `--bind_core` asked for."""

    is_auto: bool = True  # True: msrun shares the cores out
    devices: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Processors by physical device number; an empty tuple leaves that worker unbound."""
    scheduler: tuple[int, ...] = ()  # processors of the scheduler; empty = not bound


def parse_bind_core(text: str) -> CoreBinding | None:
    """Turn True, False or MindSpore's dict, a JSON object of lists, into what it asks for; None = no binding."""
    with suppress(ValueError):
        return CoreBinding() if read_truth(text.strip()) else None
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError):
        what = "neither True, False nor a JSON object"
        raise UsageError(f"--bind_core {text}: {what}; give e.g. --bind_core='{_EXAMPLE}'") from None
    if not isinstance(value, dict) or not value:
        raise UsageError(f"--bind_core {text}: not a JSON object of devices; give e.g. --bind_core='{_EXAMPLE}'")
    lists = {key: _parse_cpus(key, items) for key, items in value.items()}
    scheduler = lists.pop(SCHEDULER_KEY, ())
    for wrong in (key for key in lists if not re.match(_DEVICE_KEY, key)):
        raise UsageError(f"--bind_core: {wrong!r} is no device; keys are device0, device1, ... and {SCHEDULER_KEY}")
    devices = {int(key.removeprefix("device")): cpus for key, cpus in lists.items()}
    return CoreBinding(is_auto=False, devices=devices, scheduler=scheduler)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise UsageError(f"--bind_core: {key!r} is there {count} times; give it once")
    return dict(pairs)


def parse_cpu_range(text: str) -> range:
    """Turn `4` or `0-3` into processor numbers (ValueError: not of that form, or backwards)."""
    try:
        return read_range(text.strip(), MAX_CPU).numbers
    except RangeError as error:
        wrong = {"backwards": "runs backwards", "beyond": "is beyond every CPU number"}
        raise ValueError(f"{text!r} {wrong.get(error.reason, 'is no CPU number or range')}") from None


def _parse_cpus(key: str, items: object) -> tuple[int, ...]:
    remedy = f'give a list of strings, e.g. "{key}": ["0-3", "8"]'
    if not isinstance(items, list):
        raise UsageError(f"--bind_core: {key!r} has {json.dumps(items)}, which is no list; {remedy}")
    numbers: set[int] = set()
    for item in items:
        if not isinstance(item, str):
            raise UsageError(f"--bind_core: {key!r} has {json.dumps(item)}, which is no string; {remedy}")
        try:
            numbers.update(parse_cpu_range(item))
        except ValueError as error:
            raise UsageError(f"--bind_core: {key!r}: {error}; {remedy}") from None
    return tuple(sorted(numbers))


def parse_signals(text: str) -> tuple[int, ...]:
    """Turn `USR1,SIGUSR2` or `none` into signal numbers (UsageError: no such signal, or one that is not passed on)."""
    words = [] if text.strip().lower() in ("none", "") else [word.strip() for word in text.upper().split(",")]
    for word in words:
        name = word.removeprefix("SIG")
        if name not in FORWARDABLE:
            hint = "" if f"SIG{name}" in signal.Signals.__members__ else near_miss(name, FORWARDABLE)
            raise UsageError(
                f"--signals {text}: {word} cannot be passed on{hint}; give none or some of {', '.join(FORWARDABLE)}"
            )
    return tuple(dict.fromkeys(int(signal.Signals[f"SIG{word.removeprefix('SIG')}"]) for word in words))


class JobTerms(Record, kw_only=True):
    """What is asked of a job and holds for all of it: the same in the spec and in the plan."""

    cluster_time_out_s: int = option(
        600, "S  Limit for all hosts to register and all workers to start; negative: no limit."
    )
    grace_s: float = option(
        10.0,
        "S  Time between the signal that ends the job and KILL; TERM comes before KILL.",
        must="0 or more seconds; 0 kills at once",
    )
    forward_signals: tuple[int, ...] = option(
        (int(signal.SIGUSR1), int(signal.SIGUSR2)),
        "NAMES  Signals that are passed on to the workers and do not end the job, or none.",
        name="signals",
        asked="USR1,USR2",
        parse=parse_signals,
    )
    hang_time_out_s: float = option(
        0.0,
        "S  Without progress for so long, write stacks to the logs and end the job; 0: no limit.",
        must="0 or more seconds; 0 = no limit",
    )
    exit_time_out_s: float = option(
        contract.DEFAULT_EXIT_TIME_OUT_S,
        "S  End a worker whose program has ended and whose process shows no sign of life for so long, and ranks that "
        "wait in a collective for one that has ended; 0: no limit.",
        must="0 or more seconds; 0 = no limit",
    )
    keep_going: bool = option(
        False, "Let the other ranks go on when one has failed. The job fails when all have ended."
    )
    time_limit_s: float = option(
        0.0,
        "S  End the job after so long, all attempts together, with status 124: TERM, --grace, KILL; 0: no limit.",
        must="0 or more seconds; 0 = no limit",
    )
    max_restarts: int = option(
        0, "N  How often to start the whole job again after a failure.", must="0 or more; 0 = no restart"
    )
    restart_on: tuple[int, ...] = option(
        (),
        "LIST  Start again after these exit statuses or signals of the first failed worker alone, as 75,KILL.",
        asked="",
        parse=partial(parse_statuses, "--restart_on"),
    )
    no_restart_on: tuple[int, ...] = option(
        (),
        "LIST  Never start again after these, such as 1,2.",
        asked="",
        parse=partial(parse_statuses, "--no_restart_on"),
    )
    log_max_bytes: int = option(
        0,
        "SIZE  Free the oldest so many bytes of a log that grows, e.g. 100M or 1G; 0: never.  [default: 0]",
        asked="0",
        kind="text",
        parse=partial(parse_size, "--log_max_bytes"),
    )
    log_keep: int = option(
        5,
        "N  With --log_max_bytes: how many times that size of each log stays, beside the newest bytes.",
        least=1,
        most=1000,
        must="1 to 1000 times --log_max_bytes; to keep everything leave that out",
    )
    tail_ranks: tuple[int, ...] = (0,)  # global ranks whose log is copied to the console
    interactive_rank: int | None = option(
        None,
        "[=RANK]  The terminal and standard input belong to this rank, by default 0: for breakpoint(), input() and "
        "`... | msrun`, on one host. Its output is shown as it comes, and nobody is impatient.",
        name="interactive",
        kind="rank",
        alone="0",
    )
    settings: tuple[Setting, ...] = ()  # what is not a default, and where it came from; to be shown only


HostKeyPolicy = Literal["strict", "accept-new", "off"]


class SshSettings(Record):
    """What holds for all hosts; what a host list says of one host wins, ssh_config fills in the rest."""

    config_file: Path | None = option(
        None,
        "FILE  Read this in place of ~/.ssh/config and /etc/ssh/ssh_config; none: read no file.",
        name="ssh_config",
    )
    user: str = option("", "NAME  User on the hosts.  [default: that of ssh_config, or yours]", name="ssh_user")
    port: int = option(
        0,
        "PORT  Port of sshd.  [default: that of ssh_config, or 22]",
        name="ssh_port",
        most=MAX_PORT,
        must=f"1 to {MAX_PORT}; leave it out for that of ssh_config",
    )
    identity_files: tuple[Path, ...] = option(
        (), "FILE  Private key to try, beside those that ssh_config names; may be repeated.", name="ssh_identity"
    )
    host_keys: HostKeyPolicy | None = option(
        None,
        "POLICY  For a host that is not in known_hosts: strict rejects it, accept-new adds its key, off checks none.  "
        "[default: StrictHostKeyChecking of ssh_config, or strict]",
        name="ssh_host_keys",
        choices=get_args(HostKeyPolicy),
    )
    connect_time_out_s: float = option(
        30.0,
        "S  Limit for connecting to a host, with all attempts.",
        name="ssh_connect_time_out",
        least=MORE_THAN_0,
        most=3600.0,
        must="more than 0 and up to 3600 seconds",
    )
    window: int = option(
        32,
        "N  Number of hosts to connect to at the same time.",
        name="ssh_window",
        least=1,
        most=1024,
        must="1 to 1024 hosts at a time",
    )


class LaunchSpec(JobTerms, kw_only=True):
    """One `msrun` command, translated once by the command line. Every field was checked by `check_spec`."""

    program: Program
    worker_num: int = option(
        MISSING,
        "N  Workers of the job, over all hosts; on one host also gpu or cpu (one each), or auto (one for each "
        "accelerator, else processor).  [default: one for each accelerator, else 1; 8 for a MindSpore script]",
        asked=None,
        kind="count",
    )
    local_worker_num: int = option(MISSING, "N  Workers on each host.  [default: worker_num on one host]", asked=None)
    script_source: str = field(default="", repr=False)  # of a script that can be read only once
    working_directory: Path  # absolute; every worker starts in it
    log_dir: Path = option(
        MISSING, "DIR  Directory of logs, with a folder for each job.", asked="log_output", kind="text", parse=Path
    )
    master_addr: str = option(LOOPBACK, "ADDRESS  Address of the scheduler.")
    master_port: int = option(
        0,
        "PORT  Its port; 0 is a free one.  [default: 0; several hosts: 8118]",
        most=MAX_PORT,
        must=f"0 to {MAX_PORT}; 0 takes a free port",
    )
    node_rank: int = option(-1, "N  Index of this host.  [default: by its address]")
    server_num: int = option(
        0,
        "N  Parameter servers beside the workers; of several hosts each gets one in turn.",
        must="0 or more; 0 = no parameter servers",
    )
    start_method: StartMethod = option(
        "auto",
        "METHOD  fork: from a process that has imported what the script imports. exec: as new programs. auto: fork "
        "where that is safe.",
        choices=get_args(StartMethod),
    )
    mindspore: MindSporeKind = option(
        "auto",
        "WHICH  What `import mindspore` finds. real: MindSpore, whose scheduler msrun starts too. torch: "
        "msrun.mindspore, its words on torch. none: what Python finds. auto: for a script that imports mindspore the "
        "first of them that this Python has.",
        choices=get_args(MindSporeKind),
    )
    mindspore_semantics: MindSporeSemantics = option(
        "mindspore",
        "WHOSE  What defaults mean in scripts of msrun.mindspore. mindspore: gradients, losses of copies and micro "
        "batches are summed, each rank reads whole data sets and has its own loss. torch: means, and each rank reads "
        "its part.",
        choices=get_args(MindSporeSemantics),
    )
    device_target: DeviceTarget = option(
        "auto", "KIND  Devices of the workers, one for each: auto, cpu, gpu or ascend.", choices=get_args(DeviceTarget)
    )
    virtual_local_rank: bool = option(False, "Show each worker its device alone, as number 0; LOCAL_RANK is 0 for all.")
    is_warm: bool = option(
        False,
        "[=stop]  Keep a process that has imported torch for the next job with --warm, which starts from it. stop: end "
        "such processes.",
        name="warm",
        kind="warm",
    )
    warm_time_s: float = option(
        600.0, "S  How many seconds it waits for the next job.", least=MORE_THAN_0, must="more than 0 seconds"
    )
    preload: tuple[str, ...] = option(
        (), "MODULE  Import this before forking, too, besides torch, numpy and msrun; may be repeated."
    )
    env: tuple[tuple[str, str], ...] = ()
    rank_table_file: Path | None = option(None, "FILE  Rank table of the job.  [default: generated]")
    worker_log_name: str = option("worker", "STEM  Logs are named STEM_RANK.log; {ip} and {hostname} are replaced.")
    splits_logs: bool = option(
        False,
        "Write stderr to STEM_RANK.stderr.log, apart from stdout; here they are stderr and stdout, too.",
        name="log_split",
    )
    log_keep_jobs: int = option(
        10,
        "N  Jobs whose folders stay in the log directory, with this one.",
        least=1,
        must="1 or more jobs, with this one",
    )
    has_terminal: bool = False  # with `interactive_rank`: whether the user's standard input is a terminal
    is_raw_tail: bool = option(
        False, "Show workers' output byte for byte, with control sequences, which can change the terminal.", name="raw"
    )
    has_times: bool = option(False, "Show the time before each line of a worker.", name="log_time")
    has_progress_line: bool = option(
        False, "On a terminal, show step, speed, loss and time left of rank 0 in one line.", name="progress"
    )
    has_trace: bool = option(
        False, "Record steps and waits in collectives of every rank for `msrun trace LOG_DIR`.", name="trace"
    )
    metrics_file: Path | None = option(None, "FILE  Write the job in numbers to FILE.prom, for Prometheus.")
    bind_core: CoreBinding | None = option(
        None,
        "[=JSON]  Give each worker cores of its own, near its device, or those of a JSON object such as "
        "{'device0': ['0-3']}.",
        asked="false",
        kind="JSON",
        alone="true",
        parse=parse_bind_core,
    )
    bind_numa: bool = option(False, "Keep each worker and its memory on one NUMA node.")
    token: str = field(default="", repr=False)  # what the hosts know each other by; empty = none given
    is_under_scheduler: bool = False  # a cluster manager has started msrun: its network is the job's own
    server_token: str = field(default="", repr=False)  # what workers and servers prove; empty = none yet
    heartbeat_time_out_s: float = option(
        15.0,
        "S  The job ends when a host, or a process of msrun, is silent or stopped for so long.",
        least=1.0,
        must="1 or more seconds",
    )
    tls: TlsSpec | None = None  # how hosts of a job encrypt what they say; None = not at all
    table_hosts: tuple[HostAssignment, ...] = ()
    """The hosts of a rank table, in the order of their node_rank; one is this host, unless there are `host_entries`.
    Of an ordinary job on one host also that host, when it was given with its devices."""
    worker_log_dir: Path | None = None  # of the workers' logs, where the launcher's directory is shared
    host_entries: tuple[HostEntry, ...] = ()  # those of this command, by node_rank; empty = this host
    spares: tuple[HostEntry, ...] = ()
    min_hosts: int = option(
        0,
        "M  Start again on as few as M hosts when others are lost.  [default: with --spares all but these] Where msrun "
        "is started on each host: begin with M hosts when no others have come within --join_window.",
        asked=None,
        parse=lambda number: number or 0,
    )
    join_window_s: float = option(
        30.0,
        "S  How long more hosts may take to come once --min_hosts have.",
        must="0 or more seconds, and less than 1e+09",
    )
    rescale_now: bool = option(
        False,
        "WHEN  When a host is used that comes, or comes again, while a job with --min_hosts runs: from the next "
        "restart on, or at once, by a restart.",
        name="rescale",
        asked="restart",
        kind="word",
        choices=("restart", "now"),
        parse=lambda word: word == "now",
    )
    first_attempt: int = 0  # how often the job was started before, on other hosts
    forward_env: tuple[str, ...] = option(
        (),
        "PATTERN  Variables that the hosts get from here, e.g. 'FOO_*', besides the usual ones (PATH, PYTHONPATH, "
        "OMP_*, NCCL_*, ...; --dry_run lists them). none: not the usual ones. May be repeated.",
    )
    ship: bool = option(False, "Send msrun's code to hosts that have none.")
    ssh: SshSettings = field(default_factory=SshSettings)
    stands_for: HostEntry | None = None  # the host of a rehearsal that this process is the agent of

    @property
    def is_remote(self) -> bool:
        """Whether this command starts agents on hosts and runs no worker itself; `local_worker_num` is 0 then."""
        return bool(self.host_entries)

    @property
    def is_joined(self) -> bool:
        return any(entry.has_come for entry in self.host_entries)

    @property
    def is_rehearsal(self) -> bool:
        return any(entry.is_rehearsed for entry in self.host_entries)

    @property
    def is_several(self) -> bool:
        return not self.is_remote and self.local_worker_num < self.worker_num

    @property
    def own_device_ids(self) -> tuple[int, ...]:
        """The devices that the rank table, or a host list, gives this host; empty when they are not given."""
        own = (assignment for assignment in self.table_hosts if assignment.node_rank == max(self.node_rank, 0))
        return next((assignment.device_ids for assignment in own), ())

    @property
    def log_folder(self) -> Path:
        return self.worker_log_dir or self.log_dir

    @property
    def rank_table_path(self) -> str:
        return str(self.rank_table_file or self.log_folder / contract.RANK_TABLE_JSON)

    @property
    def meeting_port(self) -> int:
        return self.master_port or MEETING_PORT


EXCLUSIVE = (
    *((name, "interactive", "a rank's terminal shows all as it comes; give one") for name in ("log_split", "log_time")),
    ("log_time", "raw", "that shows bytes, not lines; give one of the two"),
)


def check_spec(spec: LaunchSpec) -> None:
    """Refuse what can be seen to be wrong in the words alone (UsageError)."""
    check_ranges(spec)
    check_ranges(spec.ssh)
    defaults = {one.name: one.default for one in fields(spec)}
    known = field_options(LaunchSpec)
    refuse_together({one.name for name, one in known.items() if getattr(spec, name) != defaults[name]}, EXCLUSIVE)
    if not spec.is_remote:
        _check_counts(spec)
    if not re.match(_HOST_NAME, spec.master_addr):
        raise UsageError(f"--master_addr {spec.master_addr!r}: not an address or host name; give e.g. {LOOPBACK}")
    for name, value in spec.env:
        check_env(name, value)
    if spec.forward_env:
        check_patterns(spec.forward_env)
    if spec.ssh.user:
        with blamed_on():
            check_user(spec.ssh.user, "--ssh_user")
    stem = spec.worker_log_name
    bare = stem.replace("{ip}", "").replace("{hostname}", "")
    if not re.match(_LOG_STEM, stem) or "{" in bare or "}" in bare or stem in (".", ".."):
        raise UsageError(
            f"--worker_log_name {stem}: letters, digits, '.', '_', '-' and the words {{ip}} and {{hostname}} only"
        )
    check_server_logs(stem, spec.server_num)
    if spec.log_max_bytes < 0 or 0 < spec.log_max_bytes < MIN_LOG_BYTES:
        raise UsageError(
            f"--log_max_bytes {spec.log_max_bytes}: must be {MIN_LOG_BYTES} bytes or more, e.g. 100M; 0 frees nothing"
        )
    if spec.time_limit_s and signal.SIGALRM in spec.forward_signals:
        raise UsageError("--signals ALRM and --time_limit: msrun's own timer sends ALRM; leave it out of --signals")
    if both := sorted({*spec.restart_on} & {*spec.no_restart_on}):
        raise UsageError(f"--restart_on and --no_restart_on: both name {both[0]}; give it in one of the two")
    if spec.restart_on and not spec.max_restarts:
        raise UsageError("--restart_on: starts nothing again with --max_restarts 0; give --max_restarts 1 or more")
    if spec.server_num and spec.is_several and not spec.token:
        raise UsageError(
            f"--server_num {spec.server_num}: workers and parameter servers on several hosts know each other by the "
            "job's token: give --token_file or MSRUN_TOKEN on all hosts, or start the job with --hosts"
        )
    if spec.interactive_rank is not None and (spec.is_several or spec.is_remote):
        raise UsageError(
            f"--interactive={spec.interactive_rank}: for a job on this host alone, whose terminal the rank gets; leave "
            "out what names other hosts"
        )
    shown = [("--interactive=", spec.interactive_rank), *(("--tail_worker_log ", rank) for rank in spec.tail_ranks)]
    for option_name, rank in shown:
        if rank is not None and not 0 <= rank < spec.worker_num:
            raise UsageError(f"{option_name}{rank}: no such rank; the ranks of this job are 0 to {spec.worker_num - 1}")


def _check_counts(spec: LaunchSpec) -> None:
    total, here = f"--worker_num {spec.worker_num}", f"--local_worker_num {spec.local_worker_num}"
    most = 1 + spec.worker_num - spec.local_worker_num  # this host, and others with a worker each
    is_asked = any(setting.name == "master_addr" for setting in spec.settings)  # several msruns on one machine
    if spec.worker_num < 1:
        raise UsageError(f"{total}: must be 1 or more; give the number of workers over all hosts")
    if spec.local_worker_num < 1:
        raise UsageError(f"{here}: must be 1 or more; leave it out on one host")
    if spec.local_worker_num > spec.worker_num:
        raise UsageError(f"{here}: more than {total}; a host cannot run more workers than the job has")
    if spec.min_hosts and not spec.is_several:
        raise UsageError(f"--min_hosts {spec.min_hosts}: the job has one host; leave it out")
    if spec.min_hosts and not 1 <= spec.min_hosts <= most:
        raise UsageError(f"--min_hosts {spec.min_hosts}: must be 1 to {most}, as many as {total} and {here} allow")
    if not spec.is_several and spec.node_rank not in (-1, 0):
        raise UsageError(f"--node_rank {spec.node_rank}: a job on one host has only node 0; leave it out")
    if spec.is_several and is_loopback(spec.master_addr) and not is_asked:
        raise UsageError(
            f"{here}: less than {total}, so the job has several hosts, and others cannot reach --master_addr "
            f"{spec.master_addr}; give the address of the host with the scheduler, or leave --local_worker_num out to "
            "use one host"
        )
    if spec.is_several and spec.node_rank < -1:
        raise UsageError(f"--node_rank {spec.node_rank}: must be 0 or more; leave it out to number hosts by address")


def explain_no_tests(program: Program, exit_code: int) -> str:
    """Return why pytest has failed though the file that it was given ran to its end; empty when that is not why."""
    if exit_code != _NO_TESTS or (program.kind, program.target) != ("module", "pytest"):
        return ""
    return "pytest found no test there; it had run the file to look for some: name it to msrun without pytest"


def is_loopback(address: str) -> bool:
    import ipaddress  # not for --help

    return ipaddress.ip_address(address).is_loopback if is_numeric(address) else address == "localhost"


def is_numeric(address: str) -> bool:
    import ipaddress

    try:
        return bool(ipaddress.ip_address(address))
    except ValueError:
        return False


def check_env(name: str, value: str) -> None:
    """Refuse what cannot be an environment variable, and what is msrun's own to set (UsageError)."""
    _check_name(name, f"--env {name!r}: not")
    if "\0" in value:
        raise UsageError(f"--env {name}: the value holds a NUL byte; an environment cannot carry it")
    if name in contract.RANK_VARIABLES or name in contract.JOB_VARIABLES:
        raise UsageError(f"--env {name}: msrun sets it for every worker; leave it out")


def _check_name(name: str, begin: str) -> None:
    if not re.match(_ENV_NAME, name):
        raise UsageError(f"{begin} a variable name; letters, digits and _ only, not starting with a digit")


def check_server_logs(stem: str, server_num: int) -> None:
    if server_num and contract.worker_log_name(stem, 0) == f"{contract.server_name(0)}.log":
        raise UsageError(
            f"--worker_log_name {stem}: the parameter servers of --server_num {server_num} have logs of this name; "
            "give another one"
        )


def parse_tail(text: str, worker_num: int, option: str = "--tail_worker_log") -> tuple[int, ...]:
    """Turn `all`, `none`, `-1` (MindSpore's all), `3`, `0,2` or `0-3,7` into ranks, in order (UsageError: no such)."""
    word = text.strip().lower()
    if word in ("all", "-1"):
        return tuple(range(worker_num))
    ranks: dict[int, None] = {}
    for piece in [] if word in ("none", "") else word.split(","):
        try:
            ranks.update(dict.fromkeys(read_range("-".join(map(str.strip, piece.split("-"))), worker_num - 1).numbers))
        except RangeError as error:
            why = f"{shorten(piece)!r} is no rank; give all, none, or ranks such as 0,2-3"
            if error.reason != "form":
                why = f"{piece.strip()} is outside this job; its ranks are 0 to {worker_num - 1}"
            raise UsageError(f"{option} {shorten(text)}: {why}") from None
    return tuple(ranks)


def parse_env_file(text: str, source: str) -> tuple[tuple[str, str], ...]:
    """Read `NAME=value` lines; blank lines and those that start with # are skipped, one pair of quotes is taken off."""
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(map(str.strip, text.split("\n")), 1):  # splitlines() breaks at form feeds, too
        if not line or line.startswith("#"):
            continue
        name, sign, value = line.removeprefix("export ").partition("=")
        place = f"--env_file {source}, line {number}"
        if not sign:
            raise UsageError(f"{place}: {line!r} is not NAME=value")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        _check_name(name.strip(), f"{place}: {name.strip()!r} is not")
        pairs.append((name.strip(), value))
    return tuple(pairs)


def parse_env(items: Sequence[str], current: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Turn `NAME=value`, or `NAME` alone (its value here), into pairs (UsageError: `NAME` that is not set here)."""
    pairs: list[tuple[str, str]] = []
    for name, sign, value in (item.partition("=") for item in items):
        if not sign and name not in current:
            raise UsageError(f"--env {name}: not set here; give --env {name}=VALUE")
        pairs.append((name, value if sign else current[name]))
    return tuple(pairs)

"""What launcher and worker agree on: environment names, file names, exit status. Both halves import this module and
nothing of each other; changing a name here changes the product's interface. The fields of `failure.json` are those of
`cluster.failure.JobFailure`, and stand in docs/reference/files.md.
"""

from __future__ import annotations

from typing import Final

# -- worker environment: torch's words ------------------------------------------------------------------------------
RANK: Final = "RANK"
LOCAL_RANK: Final = "LOCAL_RANK"
"""Rank in the job, and on this host."""
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
"""Workers of the job, and on this host."""
GROUP_RANK: Final = "GROUP_RANK"
GROUP_WORLD_SIZE: Final = "GROUP_WORLD_SIZE"
"""Number of this host, and how many hosts there are."""
ROLE_RANK: Final = "ROLE_RANK"
ROLE_WORLD_SIZE: Final = "ROLE_WORLD_SIZE"
ROLE_NAME: Final = "ROLE_NAME"
"""RANK, WORLD_SIZE, and the name that `--role` gives."""
TORCH_NCCL_ASYNC_ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""1 as under torchrun, unless the user says otherwise."""
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
"""A live TCPStore for `init_process_group()`."""
TORCHELASTIC_RUN_ID: Final = "TORCHELASTIC_RUN_ID"
TORCHELASTIC_RESTART_COUNT: Final = "TORCHELASTIC_RESTART_COUNT"
TORCHELASTIC_MAX_RESTARTS: Final = "TORCHELASTIC_MAX_RESTARTS"
TORCHELASTIC_USE_AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""As torchrun sets them."""
TORCHELASTIC_ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"
"""Where torch's `@record` leaves a worker's exception, for the report."""

# -- MindSpore's words ----------------------------------------------------------------------------------------------
MS_ROLE: Final = "MS_ROLE"
MS_WORKER_NUM: Final = "MS_WORKER_NUM"
MS_SCHED_HOST: Final = "MS_SCHED_HOST"
MS_SCHED_PORT: Final = "MS_SCHED_PORT"
MS_NODE_ID: Final = "MS_NODE_ID"
MS_NODE_RANK: Final = "MS_NODE_RANK"
"""As MindSpore's msrun sets them; the port is that of torch's store, for real MindSpore that of its scheduler."""
MS_TOPO_TIMEOUT: Final = "MS_TOPO_TIMEOUT"
"""`--cluster_time_out`; for real MindSpore only."""
RANK_ID: Final = "RANK_ID"
RANK_SIZE: Final = "RANK_SIZE"
DEVICE_ID: Final = "DEVICE_ID"
RANK_TABLE_FILE: Final = "RANK_TABLE_FILE"
"""As MindSpore's scripts read them; the table is generated if none is given."""
MS_SERVER_NUM: Final = "MS_SERVER_NUM"
"""How many parameter servers there are; with --server_num only."""
ROLE_WORKER: Final = "MS_WORKER"
ROLE_SCHEDULER: Final = "MS_SCHED"
ROLE_SERVER: Final = "MS_PSERVER"

# -- ours -----------------------------------------------------------------------------------------------------------
MSRUN_JOB_ID: Final = "MSRUN_JOB_ID"
MSRUN_LOG_DIR: Final = "MSRUN_LOG_DIR"
"""Id of the job, and its log directory."""
MSRUN_RENDEZVOUS: Final = "MSRUN_RENDEZVOUS"
"""`file:///path` of the FileStore that the workers of a one-host job meet on; `env://` for those of several hosts."""
MSRUN_DEVICE_TARGET: Final = "MSRUN_DEVICE_TARGET"
"""`cpu`, `gpu` or `ascend`."""

MSRUN_EXIT_TIME_OUT: Final = "MSRUN_EXIT_TIME_OUT"
"""`--exit_time_out` in seconds, if it was given; 0: no limit."""
DEFAULT_EXIT_TIME_OUT_S: Final = 300.0
"""Its default."""
MSRUN_PROGRESS: Final = "MSRUN_PROGRESS"
"""File through which the runtime reports steps and collectives: one record for each rank."""
MSRUN_TRACE_DIR: Final = "MSRUN_TRACE_DIR"
"""Directory in which every worker writes its part of the trace; with --trace only."""
MSRUN_FLIGHT_RECORDER: Final = "MSRUN_FLIGHT_RECORDER"
TORCH_FR_BUFFER_SIZE: Final = "TORCH_FR_BUFFER_SIZE"
"""Where a worker is asked for torch's flight recorder, and how much it keeps; with --hang_time_out only."""
MSRUN_SIM_LEVEL: Final = "MSRUN_SIM_LEVEL"
"""0 to 3, in a dry run only: this process stands for a rank of a world that does not exist."""
MSRUN_SIM_DEVICE: Final = "MSRUN_SIM_DEVICE"
"""Name of the device profile of a dry run, or a JSON file of one."""
SIM_DEVICES: Final = ("ascend910a", "ascend910b", "a100", "h100", "h200", "cpu")
MSRUN_SIM_ESTIMATE: Final = "MSRUN_SIM_ESTIMATE"
"""1: `msrun estimate`, which also tries other settings."""
MSRUN_STACK_SIGNAL: Final = "MSRUN_STACK_SIGNAL"
"""Number of the signal on which a worker writes the stacks of all its threads to its log."""
MSRUN_SERVER_TOKEN: Final = "MSRUN_SERVER_TOKEN"  # noqa: S105 - the name of a variable
"""What workers and parameter servers prove to each other that they know; of a job without servers it is not set."""
MSRUN_SERVER_ADDRESS: Final = "MSRUN_SERVER_ADDRESS"
"""Address on which a parameter server listens."""
MSRUN_VERIFY: Final = "MSRUN_VERIFY"
"""1: the first training step of every AutoParallel is compared with one process; 0: of none; not set: where cheap."""
MSRUN_CPU_BACKEND: Final = "MSRUN_CPU_BACKEND"
"""gloo: gloo where shared memory is the default."""
MSRUN_DEBUG: Final = "MSRUN_DEBUG"
"""1: tracebacks in the logs show every frame, also those inside msrun and torch."""
MSRUN_CAPTURE_CACHE: Final = "MSRUN_CAPTURE_CACHE"
"""on, or a folder: captures are kept for the next start, in `~/.cache/msrun/captures` or there;
not set: nowhere. share: rank 0 captures for all, as by itself where ranks outnumber cores; off: it does not."""

MSRUN_MINDSPORE_SEMANTICS: Final = "MSRUN_MINDSPORE_SEMANTICS"
"""torch: defaults in MindSpore's words mean torch's, as with --mindspore_semantics."""

WORKER_SETTINGS: Final = frozenset(
    {MSRUN_VERIFY, MSRUN_CPU_BACKEND, MSRUN_DEBUG, MSRUN_CAPTURE_CACHE, MSRUN_MINDSPORE_SEMANTICS}
)
"""What the user sets for the workers, so they inherit it."""

RANK_VARIABLES: Final = frozenset(
    (
        *(RANK, LOCAL_RANK, GROUP_RANK, ROLE_RANK, TORCHELASTIC_ERROR_FILE, RANK_ID, DEVICE_ID),
        *(MS_NODE_ID, MS_NODE_RANK, MS_ROLE, MSRUN_SERVER_ADDRESS),
    )
)
"""What makes a process a particular worker; the scheduler and the fork server never carry them."""

JOB_VARIABLES: Final = frozenset(
    (
        *(WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_WORLD_SIZE, ROLE_WORLD_SIZE, ROLE_NAME, MASTER_ADDR, MASTER_PORT),
        *(TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS, TORCHELASTIC_USE_AGENT_STORE),
        *(MS_WORKER_NUM, MS_SERVER_NUM, MS_SCHED_HOST, MS_SCHED_PORT, RANK_SIZE, RANK_TABLE_FILE, MSRUN_JOB_ID),
        *(MSRUN_LOG_DIR, MSRUN_RENDEZVOUS, MSRUN_DEVICE_TARGET, MSRUN_EXIT_TIME_OUT, MSRUN_PROGRESS, MSRUN_TRACE_DIR),
        *(MSRUN_FLIGHT_RECORDER, MSRUN_SIM_LEVEL, MSRUN_SIM_DEVICE, MSRUN_SIM_ESTIMATE, MSRUN_STACK_SIGNAL),
        MSRUN_SERVER_TOKEN,
    )
)
"""What all workers of a job share."""

# -- log directory --------------------------------------------------------------------------------------------------
SCHEDULER_LOG: Final = "scheduler.log"
RANK_TABLE_JSON: Final = "rank_table.json"
PLAN_JSON: Final = "plan.json"
EVENTS_JSONL: Final = "events.jsonl"
FAILURE_JSON: Final = "failure.json"
TRACE_JSON: Final = "trace.json"
"""What `msrun trace` writes."""
SIMULATION_JSON: Final = "simulation.json"
"""What a dry run found out; docs/how-to/dry_run.md has its fields."""
SIMULATION_HTML: Final = "simulation.html"
SIMULATION_TRACE: Final = "simulation_trace.json"
"""The simulated step for Perfetto."""
LAUNCHER_LOG: Final = "msrun.log"
"""The launcher's own text when it was detached with --join=False."""
LOCK_FILE: Final = "job.lock"
"""Held by the launcher for as long as its job uses the log directory."""
DIRECTORY_MODE: Final = 0o700
FILE_MODE: Final = 0o600

# -- progress board -------------------------------------------------------------------------------------------------
# One record per global rank, written by the worker alone, read by the agent. Native byte order: both are on one host.
#   phase         0 not heard of, 1 joining the world, 2 in it, 3 left it, 4 in it by torch alone: nothing more is told
#   steps         training steps begun
#   step_at       when the newest one began
#   loss          newest loss; nan when none was reported
#   collectives   collectives begun
#   is_waiting    1 while the worker waits in one
#   waiting_since when that wait began
#   total         steps that the program means to do in all; 0 when it has not said
#   rate_steps    steps begun at an earlier moment, 5 to 10 s before the newest step began, for steps per second
#   rate_at       that moment; 0 before the second step
#   name          the newest collective in words, UTF-8, filled up with NUL; of a worker that lingers, what it waits for
#   ended_at      when its program ended, of a worker whose process goes on for long after that; else 0
# Moments are seconds of CLOCK_MONOTONIC.
PROGRESS_RECORD: Final = "=QQddQQdQQd40x128sd"
PROGRESS_RECORD_BYTES: Final = 256
PROGRESS_NAME_BYTES: Final = 128
PHASE_UNKNOWN: Final = 0
PHASE_JOINING: Final = 1
PHASE_JOINED: Final = 2
PHASE_LEFT: Final = 3
PHASE_PLAIN_TORCH: Final = 4

# -- torch ----------------------------------------------------------------------------------------------------------
TORCH_VERSIONS: Final = ("2.12", "2.15")
"""The oldest and the newest that msrun is meant for and tested with; docs/reference/devices.md has the table."""

# -- exit status ----------------------------------------------------------------------------------------------------
EXIT_OK: Final = 0
"""All workers ended with exit code 0."""
EXIT_USAGE: Final = 2
"""Invalid input: a one-line error; no process is started."""
EXIT_CLUSTER: Final = 3
"""A fault of the cluster or of msrun: an unreachable host, a killed scheduler, a worker that never joined."""
EXIT_DO_NOT_RESTART: Final = 93
"""A worker says with it that starting the job again would not help; --max_restarts then does not."""
EXIT_TIMEOUT: Final = 124
"""A limit: --cluster_time_out, --hang_time_out, --time_limit, workers that do not end."""
EXIT_SIGNAL_BASE: Final = 128
"""This + n: the first failed worker, or msrun, was ended by signal n: 137 SIGKILL, 143 TERM, 130 Ctrl-C."""


def worker_log_name(stem: str, global_rank: int) -> str:
    """Return the log file name of a worker: `worker_3.log` for stem `worker` and rank 3."""
    return f"{stem}_{global_rank}.log"


def error_log_name(log_name: str) -> str:
    """Return where a worker's stderr goes apart from its stdout: `worker_3.stderr.log` beside `worker_3.log`."""
    return f"{log_name.removesuffix('.log')}.stderr.log"


def server_name(index: int) -> str:
    """Return the name of a parameter server, that of its log file without `.log`: `server_1`."""
    return f"server_{index}"


def trace_file_name(global_rank: int) -> str:
    """Return the name of a worker's part of the trace in the log directory: `trace_3.jsonl`."""
    return f"trace_{global_rank}.jsonl"


def flight_recorder_name(global_rank: int) -> str:
    """Return the name of a worker's dump of torch's flight recorder: `flight_recorder_3.json`."""
    return f"flight_recorder_{global_rank}.json"


def flight_recorder_pipe(prefix: str, global_rank: int) -> str:
    """Return the path of the pipe at which a worker waits to write its dump."""
    return f"{prefix}_{global_rank}"


DRAIN: Final = "drain"
"""Folder in that of a job: a file for each host that `msrun drain` asks to leave, until the launcher has taken it."""


def attempt_plan_name(attempt: int) -> str:
    """Return where the plan of an attempt on other hosts is kept: `plan.attempt_0.json`."""
    return f"{PLAN_JSON.removesuffix('.json')}.attempt_{attempt}.json"


def attempt_log_name(log_name: str, attempt: int) -> str:
    """Return where the log of an earlier attempt is kept: `worker_3.attempt_0.log` for `worker_3.log`."""
    return f"{log_name.removesuffix('.log')}.attempt_{attempt}.log"

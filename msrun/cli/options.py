"""The words of the command line: every option declared once, in the groups of --help."""

from __future__ import annotations

from pathlib import Path

import click

from msrun import contract
from msrun.cli.option_types import Boolean, Interval, OneRank, PlanForm, PlanPlace, Warm, WorkerCount, option
from msrun.cli.sources import read_sources
from msrun.planning.spec import CONNECT_TIME_OUT_S, HOST_KEY_POLICIES, SSH_CLIENTS, WARM_TIME_S, WINDOW

OPTIONAL_VALUES = {"--join": "true", "--bind_core": "true", "--bind_numa": "true", "--dry_run": "text"}
OPTIONAL_VALUES |= {"--ssh": "true", "--ship": "true", "--check": "true", "--quiet": "true", "--debug": "true"}
OPTIONAL_VALUES |= {
    "--discover": "true",
    "--raw": "true",
    "--rank_args": "true",
    "--keep_going": "true",
    "--pass_local_rank": "true",
    **dict.fromkeys(("--log_split", "--log_time", "--log_once", "--virtual_local_rank"), "true"),
    "--install_completion": "auto",
}
OPTIONAL_VALUES |= {"--warm": "true", "--plan": "text", "--watch": "auto", "--json": "true"}
OPTIONAL_VALUES |= {"--progress": "true", "--trace": "true", "--interactive": "0"}
"""Options whose value may be left out; a value is only taken after '='."""

HOST_OPTIONS = ("hosts", "hostfile", "rehearse", "include", "exclude", "python", "ssh", "spares", "min_hosts", "nnodes")
"""Each of these makes a job one of hosts that are reached from here, or has a meaning only there."""

MOST_USED = "Most used"
PATH = click.Path(path_type=Path)
SWITCH = ""
"""An option that is True when it is named; =False overrules a variable or a file."""

GROUPS: dict[str, list[click.Option]] = {
    MOST_USED: [
        option(
            "worker_num",
            "N",
            type=WorkerCount(),
            help="Workers of the job, over all hosts; on one host also gpu or cpu (one each), or auto (one for each "
            "accelerator, else processor).  [default: one for each accelerator, else 1; 8 for a MindSpore script]",
        ),
        option(
            "hosts",
            "LIST",
            help="Start the job on these hosts over SSH: h1:8,h2:4 or me@node[01-16]:8. The number after the colon is "
            "that of workers on the host; without it --local_worker_num, else an even share of --worker_num, else 1.",
        ),
        option(
            "log_dir",
            "DIR",
            default="log_output",
            show_default=True,
            help="Directory of logs, with a folder for each job.",
        ),
        option(
            "tail_worker_log",
            "RANKS",
            default="0",
            show_default=True,
            help="Ranks whose output is shown here: 0,2-3, all (-1) or none.",
        ),
        option(
            "dry_run",
            "[=json]",
            type=PlanForm(["text", "json"]),
            help="Print the plan and start nothing. Asks no host: what hosts decide is left out.",
        ),
    ],
    "Job": [
        click.Option(["-m", "module"], is_flag=True, help="SCRIPT is the name of a module, as in python -m."),
        option(
            "config",
            "FILE",
            type=PATH,
            envvar="MSRUN_CONFIG",
            is_eager=True,
            callback=read_sources,
            help="YAML file with options, script, args and env. Paths in it are relative to the current directory.",
        ),
        option(
            "join",
            "=False",
            type=Boolean(),
            default=True,
            help="Start the job in the background, also as --detach. The default, --join=True, waits for it.",
        ),
        option(
            "interactive",
            "[=RANK]",
            type=OneRank(),
            help="The terminal and standard input belong to this rank, by default 0: for breakpoint(), input() and "
            "`... | msrun`. Its output is shown as it comes, and nobody is impatient.",
        ),
        option("chdir", "DIR", type=PATH, help="Directory that workers start in.  [default: the current one]"),
        option(
            "env",
            "NAME[=VALUE]",
            multiple=True,
            help="Variable for every worker; {rank}, {local_rank}, {node_rank} in it are its numbers. May be repeated.",
        ),
        option("env_file", "FILE", type=PATH, help="File of NAME=VALUE lines for every worker."),
        option(
            "role",
            "NAME",
            default="default",
            help="ROLE_NAME of the workers. Of several programs, -n 1 a.py : -n 3 b.py, each may have one: ROLE_RANK "
            "and ROLE_WORLD_SIZE count the workers of a role.",
        ),
        option(
            "rank_args",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Replace {rank}, {local_rank} and {node_rank} in ARGS by the numbers of the worker.",
        ),
        option(
            "pass_local_rank",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Make --local-rank=N the first of ARGS, for scripts of torch.distributed.launch.",
        ),
        option(
            "device_target",
            "KIND",
            type=click.Choice(["auto", "cpu", "gpu", "ascend"]),
            default="auto",
            show_default=True,
            help="Devices of the workers, one for each: auto, cpu, gpu or ascend.",
        ),
        option(
            "virtual_local_rank",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Show each worker its device alone, as number 0; LOCAL_RANK is 0 for all.",
        ),
        option(
            "bind_core",
            "[=JSON]",
            metavar="[=True|False|DICT]",
            default="false",
            help="Give each worker cores of its own, near its device, or those of a JSON object such as "
            "{'device0': ['0-3']}.",
        ),
        option(
            "bind_numa",
            SWITCH,
            metavar="[=True|False]",
            default="false",
            help="Keep each worker and its memory on one NUMA node.",
        ),
        option(
            "server_num",
            "N",
            type=int,
            default=0,
            show_default=True,
            help="Parameter servers beside the workers; of several hosts each gets one in turn.",
        ),
        option("rank_table_file", "FILE", type=PATH, help="Rank table of the job.  [default: generated]"),
        option(
            "sim_level",
            "LEVEL",
            type=click.IntRange(0, 3),
            help="Dry run of the script's first training step in one process, on a world that does not exist. 0: the "
            "plan; 1: also memory; 2: also time; 3: run the steps of one rank for real, nothing sent.",
        ),
        option("sim_rank_id", "RANK", type=int, default=0, show_default=True, help="Rank that a dry run stands for."),
        option(
            "sim_device",
            "PROFILE",
            default="cpu",
            show_default=True,
            help="Device profile of a dry run: ascend910a, ascend910b, a100, h100, h200, cpu, or a JSON file.",
        ),
        option(
            "start_method",
            "METHOD",
            type=click.Choice(["auto", "fork", "exec"]),
            default="auto",
            show_default=True,
            help="fork: from a process that has imported what the script imports. exec: as new programs. auto: fork "
            "where that is safe.",
        ),
        option(
            "mindspore",
            "WHICH",
            type=click.Choice(["auto", "real", "torch", "none"]),
            default="auto",
            show_default=True,
            help="What `import mindspore` finds. real: MindSpore, whose scheduler msrun starts too. torch: "
            "msrun.mindspore, its words on torch. none: what Python finds. auto: for a script that imports mindspore "
            "the first of them that this Python has.",
        ),
        option(
            "mindspore_semantics",
            "WHOSE",
            type=click.Choice(["mindspore", "torch"]),
            default="mindspore",
            show_default=True,
            help="What defaults mean in scripts of msrun.mindspore. mindspore: gradients, losses of copies and micro "
            "batches are summed, each rank reads whole data sets and has its own loss. torch: means, and each rank "
            "reads its part.",
        ),
        option(
            "preload",
            "MODULE",
            multiple=True,
            help="Import this before forking, too, besides torch, numpy and msrun; may be repeated.",
        ),
        option(
            "warm",
            "[=stop]",
            type=Warm(),
            default=False,
            help="Keep a process that has imported torch for the next job with --warm, which starts from it. stop: end "
            "such processes.",
        ),
        option(
            "warm_time",
            "S",
            type=float,
            default=WARM_TIME_S,
            show_default=True,
            help="How many seconds it waits for the next job.",
        ),
    ],
    "Hosts": [
        option("local_worker_num", "N", type=int, help="Workers on each host.  [default: worker_num on one host]"),
        option("hostfile", "FILE", type=PATH, help="The hosts as a file with lines such as: h1 slots=8."),
        option(
            "rehearse",
            "HxW",
            help="Start the job on H hosts of W workers that agents on this machine stand for, such as 4x2: without "
            "SSH, all else as on several hosts. H alone: workers as for hosts of --hosts without a number.",
        ),
        option("include", "LIST", help="Use only these hosts and devices of the list: h1@h2:0,2-3."),
        option("exclude", "LIST", help="Use all hosts and devices but these: h1@h2:0."),
        option("master_addr", "ADDRESS", default="127.0.0.1", show_default=True, help="Address of the scheduler."),
        option(
            "master_port",
            "PORT",
            type=int,
            default=0,
            help="Its port; 0 is a free one.  [default: 0; several hosts: 8118]",
        ),
        option("node_rank", "N", type=int, default=-1, help="Index of this host.  [default: by its address]"),
        option(
            "discover",
            "=False",
            type=Boolean(),
            default=True,
            help="Do not take hosts, workers and address from Slurm, mpirun, Kubernetes or torchrun's PET_ variables "
            "where they are not given.",
        ),
        option(
            "cluster_time_out",
            "S",
            type=int,
            default=600,
            show_default=True,
            help="Limit for all hosts to register and all workers to start; negative: no limit.",
        ),
        option(
            "heartbeat_time_out",
            "S",
            type=float,
            default=15.0,
            show_default=True,
            help="The job ends when a host, or a process of msrun, is silent or stopped for so long.",
        ),
        option("token_file", "FILE", type=PATH, help="File with the secret that the hosts of a job share."),
        option("tls_config", "FILE", type=PATH, help="JSON file of certificates: hosts and scheduler use TLS."),
    ],
    "SSH": [
        option("ssh", SWITCH, type=Boolean(), default=False, help="Start on the servers of --rank_table_file."),
        option("python", "PATH", help="Python on the hosts, an absolute path.  [default: that of msrun here]"),
        option("ship", SWITCH, type=Boolean(), default=False, help="Send msrun's code to hosts that have none."),
        option(
            "forward_env",
            "PATTERN",
            multiple=True,
            help="Variables that the hosts get from here, e.g. 'FOO_*', besides the usual ones (PATH, PYTHONPATH, "
            "OMP_*, NCCL_*, ...; --dry_run lists them). none: not the usual ones. May be repeated.",
        ),
        option(
            "ssh_client",
            "CLIENT",
            type=click.Choice(SSH_CLIENTS),
            default="auto",
            show_default=True,
            help="What logs in: openssh, the ssh of this host; paramiko, no program, but less of ssh_config; auto: "
            "paramiko where there is no ssh.",
        ),
        option(
            "ssh_config",
            "FILE",
            type=PATH,
            help="Read this in place of ~/.ssh/config and /etc/ssh/ssh_config; none: read no file.",
        ),
        option("ssh_user", "NAME", default="", help="User on the hosts.  [default: that of ssh_config, or yours]"),
        option("ssh_port", "PORT", type=int, default=0, help="Port of sshd.  [default: that of ssh_config, or 22]"),
        option(
            "ssh_identity",
            "FILE",
            type=PATH,
            multiple=True,
            help="Private key to try, beside those that ssh_config names; may be repeated.",
        ),
        option(
            "ssh_host_keys",
            "POLICY",
            type=click.Choice(HOST_KEY_POLICIES),
            help="For a host that is not in known_hosts: strict rejects it, accept-new adds its key, off checks none. "
            " [default: StrictHostKeyChecking of ssh_config, or strict]",
        ),
        option(
            "ssh_connect_time_out",
            "S",
            type=float,
            default=CONNECT_TIME_OUT_S,
            show_default=True,
            help="Limit for connecting to a host, with all attempts.",
        ),
        option(
            "ssh_window",
            "N",
            type=int,
            default=WINDOW,
            show_default=True,
            help="Number of hosts to connect to at the same time.",
        ),
    ],
    "Logs": [
        option(
            "worker_log_name",
            "STEM",
            default="worker",
            show_default=True,
            help="Logs are named STEM_RANK.log; {ip} and {hostname} are replaced.",
        ),
        option(
            "log_split",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Write stderr to STEM_RANK.stderr.log, apart from stdout; here they are stderr and stdout, too.",
        ),
        option("log_time", SWITCH, type=Boolean(), default=False, help="Show the time before each line of a worker."),
        option(
            "log_once",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Show a line that all ranks of --tail_worker_log write once: [x8] line.",
        ),
        option(
            "log_max_bytes",
            "SIZE",
            default="0",
            help="Rotate a worker's log at this size, e.g. 100M or 1G; 0: never.  [default: 0]",
        ),
        option(
            "log_keep_jobs",
            "N",
            type=int,
            default=10,
            show_default=True,
            help="Jobs whose folders stay in the log directory, with this one.",
        ),
        option("log_keep", "N", type=int, default=5, show_default=True, help="Rotated files to keep for each worker."),
        option(
            "raw",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Show workers' output byte for byte, with control sequences, which can change the terminal.",
        ),
        option(
            "trace",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Record steps and waits in collectives of every rank for `msrun trace LOG_DIR`.",
        ),
        option("metrics_file", "FILE", type=PATH, help="Write the job in numbers to FILE.prom, for Prometheus."),
        option(
            "progress",
            SWITCH,
            type=Boolean(),
            default=False,
            help="On a terminal, show step, speed, loss and time left of rank 0 in one line.",
        ),
        option("quiet", SWITCH, type=Boolean(), default=False, help="Print only errors of msrun itself."),
    ],
    "Failure": [
        option(
            "keep_going",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Let the other ranks go on when one has failed. The job fails when all have ended.",
        ),
        option(
            "max_restarts",
            "N",
            type=int,
            default=0,
            show_default=True,
            help="How often to start the whole job again after a failure.",
        ),
        option(
            "restart_on",
            "LIST",
            default="",
            help="Start again after these exit statuses or signals of the first failed worker alone, as 75,KILL.",
        ),
        option("no_restart_on", "LIST", default="", help="Never start again after these, such as 1,2."),
        option(
            "spares",
            "N",
            type=int,
            default=0,
            show_default=True,
            help="The last N hosts of the list wait, and take the place of lost ones, as often as --max_restarts says.",
        ),
        option(
            "min_hosts",
            "M",
            type=int,
            help="Start again on as few as M hosts when others are lost.  [default: with --spares all but these] Where "
            "msrun is started on each host: begin with M hosts when no others have come within --join_window.",
        ),
        option(
            "join_window",
            "S",
            type=float,
            default=30,
            show_default=True,
            help="How long more hosts may take to come once --min_hosts have.",
        ),
        option(
            "rescale",
            "WHEN",
            type=click.Choice(["restart", "now"]),
            default="restart",
            show_default=True,
            help="When a host is used that comes, or comes again, while a job with --min_hosts runs: from the next "
            "restart on, or at once, by a restart.",
        ),
        option(
            "nnodes",
            "MIN:MAX",
            help="In torchrun's words: of a list of hosts MAX run the job, the others are spare, and MIN are enough to "
            "start again.",
        ),
        option(
            "hang_time_out",
            "S",
            type=float,
            default=0.0,
            show_default=True,
            help="Without progress for so long, write stacks to the logs and end the job; 0: no limit.",
        ),
        option(
            "exit_time_out",
            "S",
            type=float,
            default=contract.DEFAULT_EXIT_TIME_OUT_S,
            show_default=True,
            help="End a worker whose program has ended and whose process shows no sign of life for so long, and ranks "
            "that wait in a collective for one that has ended; 0: no limit.",
        ),
        option(
            "time_limit",
            "S",
            type=float,
            default=0.0,
            show_default=True,
            help="End the job after so long, all attempts together, with status 124: TERM, --grace, KILL; 0: no limit.",
        ),
        option(
            "grace",
            "S",
            type=float,
            default=10.0,
            show_default=True,
            help="Time between the signal that ends the job and KILL; TERM comes before KILL.",
        ),
        option(
            "signals",
            "NAMES",
            default="USR1,USR2",
            show_default=True,
            help="Signals that are passed on to the workers and do not end the job, or none.",
        ),
        option("debug", SWITCH, type=Boolean(), default=False, help="Show msrun's own tracebacks."),
    ],
    "Inspect": [
        option(
            "plan",
            "[=FILE.html]",
            type=PlanPlace(),
            help="Ask the hosts and print the plan with all that they decide, or write it as a page; =json prints "
            "JSON. Starts nothing.",
        ),
        option(
            "check",
            SWITCH,
            type=Boolean(),
            default=False,
            help="Check the hosts for the job, line by line; start nothing.",
        ),
        option("status", "LOG_DIR", type=PATH, help="Show the job of this log directory, running or ended."),
        option(
            "watch",
            "[=S]",
            type=Interval(),
            help="With --status: show it every S seconds until the job has ended.  [default: 1; not on a terminal: 10]",
        ),
        option("json", SWITCH, type=Boolean(), default=False, help="With --status: print it as JSON."),
        option("stop", "LOG_DIR", type=PATH, help="End the job of this log directory and wait for its end."),
        option(
            "install_completion",
            "[=SHELL]",
            type=click.Choice(["auto", "bash", "zsh", "fish"]),
            help="Install completion of options for bash, zsh or fish.  [default: your login shell]",
        ),
    ],
}
"""All options; --help and --version come after those of the last group."""

OPTIONS: list[click.Parameter] = [parameter for group in GROUPS.values() for parameter in group]

"""Kinds that are scripts: of a person's shell, of Slurm, PBS and LSF, and a task of SkyPilot. Pure.

The docstring of a function is what its kind says of itself. What stands in a directive has been checked to be one line;
every other word of the user is quoted for the shell.
"""

import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from launch_templates.errors import BadValue
from launch_templates.pod import RESTART_FIELDS, grace_s, msrun_options, restart_options
from launch_templates.spec import JobSpec
from launch_templates.values import parse_quantity

SHELL = "#!/usr/bin/env bash\n"
BY_MSRUN = ("script", "local_worker_num", "log_dir", *RESTART_FIELDS, "grace_s", "env")
"""Fields of every kind in which msrun itself restarts workers."""
CLUSTER_TAKES = (*BY_MSRUN, "nodes", "master_port", "cluster_time_out")
SKYPILOT_TAKES = (*BY_MSRUN, "name", "image", "nodes", "device_target", "cpu", "memory", "cluster_time_out",
                  "resources")  # fmt: skip
BATCH_TAKES = (*BY_MSRUN, "name", "nodes", "device_target", "cpu", "memory", "cluster_time_out", "spares", "deadline_s",
               "queue", "requeue")  # fmt: skip
_PBS_HOSTS, _LSF_HOSTS = '"--hostfile=$PBS_NODEFILE"', '"--hostfile=$LSB_DJOB_HOSTFILE"'


def write_run(spec: JobSpec) -> str:
    """run: shell script for one host

    Ranks: msrun numbers the workers of this host. It restarts them itself.
    """
    count = spec.local_worker_num
    words = ["msrun", f"--worker_num={count}", f"--local_worker_num={count}", *own_options(spec), *spec.script]
    return f"{SHELL}{exports(spec)}exec {shlex.join(words)}\n"


def write_run_cluster(spec: JobSpec) -> str:
    """run-cluster: shell script to start by hand on every host, with MASTER_ADDR and NODE_RANK

    Ranks: bash run_cluster.sh MASTER_ADDR NODE_RANK, where MASTER_ADDR is an address of the host with
    NODE_RANK 0 that all others reach. msrun restarts workers itself.
    """
    usage = "master_addr=${1:?usage: run_cluster.sh MASTER_ADDR NODE_RANK} node_rank=${2:?give NODE_RANK, from 0}\n"
    place = '"--master_addr=$master_addr" "--node_rank=$node_rank"'
    words = shlex.join([*msrun_options(spec, restarts=True), *spec.script])
    return f"{SHELL}{usage}{exports(spec)}exec msrun {place} {words}\n"


def build_skypilot(spec: JobSpec) -> list[dict[str, Any]]:
    """skypilot: task of SkyPilot; one msrun on each of num_nodes machines of a cloud or cluster

    Ranks: msrun takes node rank, nodes, master and port from SkyPilot's variables. It restarts workers itself; machines
    that are taken away start the task again where SkyPilot runs it as a managed job (sky jobs launch).
    """
    if spec.device_target == "GPU" and "accelerators" not in spec.resources:
        remedy = f'add --set resources="{{accelerators: H100:{spec.local_worker_num}}}"'
        raise BadValue("resources", spec.resources, "SkyPilot's, with accelerators, with device_target=GPU", remedy)
    cores, gib = math.ceil(parse_quantity(spec.cpu)), math.ceil(parse_quantity(spec.memory) / 2**30)
    amounts = {"cpus": f"{cores}+", "memory": f"{gib}+", "image_id": f"docker:{spec.image}", **spec.resources}
    run = f"exec {shlex.join(['msrun', *host_options(spec), *spec.script])}\n"
    task = {"name": spec.name, "num_nodes": spec.nodes, "resources": amounts, "run": run}
    return [{**task, "envs": spec.env} if spec.env else task]


def write_slurm(spec: JobSpec) -> str:
    """slurm: batch script of Slurm; srun starts one msrun on each node

    Ranks: msrun takes node rank, nodes, master and port from the variables of the job step.
    A failed node ends the step (kill-on-bad-exit), with its exit status. msrun restarts workers itself. With a
    deadline, processes get SIGTERM grace_s seconds before it.
    With requeue=true Slurm runs the job again after a preemption or a lost node, and the script has it run again after
    the deadline: the program has to continue from its checkpoint.
    With spares, one msrun on the first node starts the workers of all by SSH, which the cluster must allow in
    an allocation (pam_slurm_adopt). A lost node then costs a restart; the first node cannot be replaced.
    """
    cpus, memory = _amounts(spec)
    ends_by_script = spec.requeue and spec.deadline_s is not None
    # steps get TERM; msrun in place of the batch script is no step, and a script that requeues is told by USR1
    signal = "B:USR1" if ends_by_script else "B:TERM" if spec.spares else "TERM"
    directives: dict[str, Any] = {
        "job-name": spec.name,
        "nodes": spec.nodes + spec.spares,
        "ntasks-per-node": 1,
        "cpus-per-task": cpus,
        "mem": f"{memory}M",
        "gpus-per-node": spec.local_worker_num if spec.device_target == "GPU" else None,
        "partition": spec.queue,
        "qos": spec.priority,
        "time": f"{spec.deadline_s // 60}:{spec.deadline_s % 60:02}" if spec.deadline_s else None,
        "signal": f"{signal}@{spec.grace_s}" if spec.deadline_s else None,
        **({"requeue": "", "open-mode": "append"} if spec.requeue else {"no-requeue": ""}),
        "no-kill": "" if spec.spares else None,
        **spec.sbatch,
    }
    if spec.spares:
        command = _over_ssh(spec, '"--hosts=$SLURM_JOB_NODELIST"')
    else:
        step = {"ntasks-per-node": 1, "cpus-per-task": cpus, "kill-on-bad-exit": 1, **spec.srun}
        command = shlex.join(["srun", *_long(step), "msrun", *host_options(spec), *spec.script])
    run = f"exec {command}\n"
    if ends_by_script:
        stop = 'kill -TERM "$step"' if spec.spares else 'scancel --signal=TERM "$SLURM_JOB_ID"'
        run = (
            f"trap 'is_over=yes; {stop}' USR1\n{command} &\nstep=$!\nwait \"$step\"\nstatus=$?\n"
            '[ -z "${is_over:-}" ] || { wait "$step"; status=$?; }\n'
            '[ -z "${is_over:-}" ] || [ "$status" = 0 ] || scontrol requeue "$SLURM_JOB_ID"\nexit "$status"\n'
        )
    return _script("#SBATCH", _long(directives), spec, run)


def write_pbs(spec: JobSpec) -> str:
    """pbs: batch script of PBS Professional and OpenPBS; msrun starts the workers of all nodes by SSH

    Ranks: msrun on the first node reads the nodes from $PBS_NODEFILE, one line for each. The nodes must accept SSH of
    the user inside a job. msrun restarts workers itself; a spare node takes the place of a lost one, but for the first.
    """
    cpus, memory = _amounts(spec)
    devices = f":ngpus={spec.local_worker_num}" if spec.device_target == "GPU" else ""
    seconds = spec.deadline_s or 0
    directives = [
        f"-N {spec.name}",
        f"-l select={spec.nodes + spec.spares}:ncpus={cpus}:mem={memory}mb:mpiprocs=1{devices}",
        "-l place=scatter",
        f"-l walltime={seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}" if seconds else "",
        f"-q {spec.queue}" if spec.queue else "",
        f"-r {'y' if spec.requeue else 'n'}",
        *(f"-{name} {value}".rstrip() for name, value in spec.qsub.items()),
    ]
    run = f"exec {_over_ssh(spec, _PBS_HOSTS)}\n"
    return _script("#PBS", directives, spec, run, 'cd "$PBS_O_WORKDIR" || exit\n')


def write_lsf(spec: JobSpec) -> str:
    """lsf: batch script of IBM Spectrum LSF; msrun starts the workers of all hosts by SSH

    Ranks: msrun on the first host reads the hosts from $LSB_DJOB_HOSTFILE, one line for each. The hosts must accept SSH
    of the user inside a job. msrun restarts workers itself; a spare host takes the place of a lost one, not the first.
    """
    cpus, memory = _amounts(spec)
    directives = [
        f"-J {spec.name}",
        f"-n {spec.nodes + spec.spares}",
        f'-R "span[ptile=1] affinity[core({cpus})] rusage[mem={memory}MB]"',
        f'-gpu "num={spec.local_worker_num}"' if spec.device_target == "GPU" else "",
        f"-W {math.ceil(spec.deadline_s / 60)}" if spec.deadline_s else "",
        f"-q {spec.queue}" if spec.queue else "",
        "-r" if spec.requeue else "",
        *(f"-{name} {value}".rstrip() for name, value in spec.bsub.items()),
    ]
    return _script("#BSUB", directives, spec, f"exec {_over_ssh(spec, _LSF_HOSTS)}\n")


def own_options(spec: JobSpec) -> list[str]:
    """Return what msrun itself does, where no cluster does it."""
    return [
        *([f"--log_dir={spec.log_dir}"] if spec.log_dir else []),
        *restart_options(spec),
        f"--grace={grace_s(spec)}",
    ]


def host_options(spec: JobSpec) -> list[str]:
    """Return the options of a host that finds its place by itself."""
    count = f"--local_worker_num={spec.local_worker_num}"
    return [count, f"--cluster_time_out={spec.cluster_time_out}", *own_options(spec)]


def exports(spec: JobSpec) -> str:
    """Return the lines of a shell that set the user's variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in spec.env.items())


def _script(mark: str, directives: Iterable[str], spec: JobSpec, run: str, where: str = "") -> str:
    lines = "".join(f"{mark} {line}\n" for line in directives if line)
    return f"{SHELL}{lines}{where}{exports(spec)}{run}"


def _long(options: Mapping[str, Any]) -> list[str]:
    """Options of Slurm; one of an empty text has no value, and one of None is left out."""
    given = [(name, value) for name, value in options.items() if value is not None]
    return [f"--{name}={value}" if value != "" else f"--{name}" for name, value in given]


def _amounts(spec: JobSpec) -> tuple[int, int]:
    """Cores and MiB of a node, which are asked for in whole numbers."""
    return math.ceil(parse_quantity(spec.cpu)), math.ceil(parse_quantity(spec.memory) / 2**20)


def _over_ssh(spec: JobSpec, hosts: str) -> str:
    """One msrun that starts the workers of all hosts, to which SSH brings no variables of its own."""
    spares = [f"--spares={spec.spares}"] if spec.spares else []
    words = [*host_options(spec), *spares, *(f"--env={name}" for name in spec.env), *spec.script]
    return f"msrun {hosts} {shlex.join(words)}"

"""The formats of other launchers: host lists, Slurm, torchrun, files of environment variables, Accelerate, Ansible.

Sources: the host file parsers of DeepSpeed's runner and of PRRTE, the documentation of MPICH's Hydra, Intel MPI and
Horovod: all of them number the ranks host by host in the order of the list. Slurm sorts the hosts of --nodelist itself
and numbers the tasks in that order; a file named by SLURM_HOSTFILE has one host per task, in the order of rank, and
keeps any order. Only torchrun's static rendezvous obeys --node-rank (with --rdzv-backend c10d the hosts are numbered as
they come), so its commands name the master's address and port; Accelerate hands its numbers on to torchrun, so the
ranks count up from host to host, and every host must have as many devices. Variables are those of torch.distributed and
torchrun (RANK ... MASTER_PORT, PET_*), HCCL and MindSpore (RANK_ID, RANK_SIZE, DEVICE_ID); a line is NAME=value,
without quotes, as `docker --env-file` reads it. An Ansible inventory says which ranks a host has, so that a play can
start them; a colon would be taken for a port there, so a host with an IPv6 address is given a name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from ranktable.errors import BuildError
from ranktable.export import Exporter, Job, Node, refuse_colons
from ranktable.hosts.brackets import fold
from ranktable.hosts.ranges import fold_numbers
from ranktable.ordering import numeric_key

VISIBLE_DEVICES = {"ascend": "ASCEND_RT_VISIBLE_DEVICES", "gpu": "CUDA_VISIBLE_DEVICES"}
"""The variable that says which devices of the host a process sees, by device target; a CPU has none."""
_DISTRIBUTED_TYPES = {"ascend": "MULTI_NPU", "gpu": "MULTI_GPU", "cpu": "MULTI_CPU"}
_NOT_IN_GROUPS = re.compile(r"[^A-Za-z0-9_]")


def _write_slots(job: Job) -> dict[str, str]:
    """Return `host slots=8` lines, which DeepSpeed, Open MPI and Horovod's --hostfile read."""
    return {"": "".join(f"{node.name} slots={len(node.devices)}\n" for node in job.nodes)}


def _write_hydra(job: Job) -> dict[str, str]:
    """Return `host:8` lines."""
    refuse_colons(job.nodes, "an MPICH host file")
    return {"": "".join(f"{node.name}:{len(node.devices)}\n" for node in job.nodes)}


def _write_horovod(job: Job) -> dict[str, str]:
    """Return the one line that horovodrun takes after -H."""
    refuse_colons(job.nodes, "a Horovod host list")
    return {"": ",".join(f"{node.name}:{len(node.devices)}" for node in job.nodes) + "\n"}


DEEPSPEED = Exporter("a DeepSpeed host file (deepspeed --hostfile)", _write_slots)
OPENMPI = Exporter("an Open MPI host file (mpirun --hostfile)", _write_slots)
MPICH = Exporter("an MPICH or Intel MPI host file (mpiexec -f)", _write_hydra)
HOROVOD = Exporter("a Horovod host list (horovodrun -H)", _write_horovod)


def _write_hostlist(job: Job) -> dict[str, str]:
    refuse_colons(job.nodes, "a Slurm host list")
    return {"": fold(node.name for node in job.nodes) + "\n"}


def _write_hostfile(job: Job) -> dict[str, str]:
    refuse_colons(job.nodes, "a Slurm host file")
    names = {rank: node.name for node in job.nodes for rank in node.ranks}
    return {"": "".join(f"{names[rank]}\n" for rank in range(job.world_size))}


def _find_losses(job: Job) -> tuple[str, ...]:
    counts = [len(node.devices) for node in job.nodes]
    lost = [f"the devices per server (give Slurm {_ask_for(counts)})"]
    names = [node.name for node in job.nodes]
    if names != sorted(names, key=numeric_key):
        lost.append("the order of the servers (Slurm sorts the hosts itself; slurm-hostfile keeps it)")
    return tuple(lost)


def _ask_for(counts: list[int]) -> str:
    if len(set(counts)) == 1:
        return f"--nodes={len(counts)} --ntasks-per-node={counts[0]}"
    return f"--nodes={len(counts)} --ntasks={sum(counts)}, and slurm-hostfile for unequal servers"


HOSTLIST = Exporter("a Slurm host list (srun --nodelist)", _write_hostlist, find_losses=_find_losses)
HOSTFILE = Exporter(
    "a Slurm host file (SLURM_HOSTFILE with srun --distribution=arbitrary)", _write_hostfile, keeps_ranks=True
)


def visible_devices(job: Job, node: Node) -> dict[str, str]:
    """Return the variable that gives the processes of a host their devices; none when they are 0, 1, 2, ..."""
    variable = VISIBLE_DEVICES.get(job.device_target)
    if variable is None or node.device_ids == tuple(range(len(node.devices))):
        return {}
    return {variable: ",".join(str(device_id) for device_id in node.device_ids)}


def _write_commands(job: Job) -> dict[str, str]:
    return {"": "".join(f"# {_introduce(node)}\n{_command(job, node)}\n" for node in job.nodes)}


def _introduce(node: Node) -> str:
    noun = "rank" if len(node.ranks) == 1 else "ranks"
    return f"on {node.name}: {noun} {fold_numbers(list(node.ranks))}"


def _command(job: Job, node: Node) -> str:
    words = [
        "torchrun",
        f"--nnodes={len(job.nodes)}",
        f"--node-rank={node.node_rank}",
        f"--nproc-per-node={len(node.devices)}",
        f"--master-addr={job.master}",
        f"--master-port={job.master_port}",
        *job.command,
    ]
    assignments = [f"{name}={value} " for name, value in visible_devices(job, node).items()]
    return "".join(assignments) + shlex.join(words)


TORCHRUN = Exporter("torchrun commands, one per host", _write_commands, frozenset({"device_id"}))


def _write_nodes(job: Job) -> dict[str, str]:
    """Return `node_<i>.env` for each host: what torchrun reads in place of its options, and the plain names."""
    return {f"node_{node.node_rank}.env": _lines(node, _node_variables(job, node)) for node in job.nodes}


def _write_ranks(job: Job) -> dict[str, str]:
    """Return `rank_<i>.env` for each rank."""
    files = {
        device.rank_id: _lines(node, _rank_variables(job, node, local_rank))
        for node in job.nodes
        for local_rank, device in enumerate(node.devices)
    }
    return {f"rank_{rank}.env": files[rank] for rank in sorted(files)}


def _node_variables(job: Job, node: Node) -> dict[str, object]:
    return {
        "MASTER_ADDR": job.master,
        "MASTER_PORT": job.master_port,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": len(node.devices),
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": len(job.nodes),
        "PET_NNODES": len(job.nodes),
        "PET_NODE_RANK": node.node_rank,
        "PET_NPROC_PER_NODE": len(node.devices),
        "PET_MASTER_ADDR": job.master,
        "PET_MASTER_PORT": job.master_port,
        **visible_devices(job, node),
    }


def _rank_variables(job: Job, node: Node, local_rank: int) -> dict[str, object]:
    device = node.devices[local_rank]
    return {
        "MASTER_ADDR": job.master,
        "MASTER_PORT": job.master_port,
        "RANK": device.rank_id,
        "WORLD_SIZE": job.world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": len(node.devices),
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": len(job.nodes),
        "RANK_ID": device.rank_id,
        "RANK_SIZE": job.world_size,
        "DEVICE_ID": device.device_id,
    }


def _lines(node: Node, variables: Mapping[str, object]) -> str:
    return f"# on {node.name}\n" + "".join(f"{name}={value}\n" for name, value in variables.items())


NODES = Exporter("a file of environment variables per host", _write_nodes, frozenset({"device_id"}))
RANKS = Exporter("a file of environment variables per rank", _write_ranks, frozenset({"device_id"}), keeps_ranks=True)


def _write_configs(job: Job) -> dict[str, str]:
    if len({len(node.devices) for node in job.nodes}) > 1:
        raise BuildError("Accelerate takes equal numbers of devices on every host", "use torchrun for this table")
    return {f"node_{node.node_rank}.yaml": _config(job, node) for node in job.nodes}


def _config(job: Job, node: Node) -> str:
    lines: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _DISTRIBUTED_TYPES[job.device_target],
        "machine_rank": node.node_rank,
        "num_machines": len(job.nodes),
        "num_processes": job.world_size,
        "main_process_ip": f"'{job.master}'",
        "main_process_port": job.master_port,
        "rdzv_backend": "static",
        "same_network": "true",
        "use_cpu": str(job.device_target == "cpu").lower(),
    }
    if job.device_target != "cpu":
        lines["gpu_ids"] = f"'{','.join(str(device_id) for device_id in node.device_ids)}'"
    return f"# on {node.name}\n" + "".join(f"{key}: {value}\n" for key, value in lines.items())


ACCELERATE = Exporter("Accelerate configurations, one per host", _write_configs, frozenset({"device_id"}))


def _write_inventory(job: Job) -> dict[str, str]:
    lines = ["[workers]", *(_host_line(node) for node in job.nodes)]
    for group, nodes in _super_pods(job).items():
        lines += ["", f"[{group}]", *(_alias(node) for node in nodes)]
    lines += ["", "[workers:vars]", f"master_addr={job.master}", f"master_port={job.master_port}"]
    lines += [f"world_size={job.world_size}", f"num_nodes={len(job.nodes)}"]
    return {"": "\n".join(lines) + "\n"}


def _host_line(node: Node) -> str:
    alias = _alias(node)
    address = node.host_ip if alias == node.name else node.name
    words = [alias, *([f"ansible_host={address}"] if address and address != alias else [])]
    words += [f"node_rank={node.node_rank}", f"num_devices={len(node.devices)}"]
    words += [f"ranks={_join_numbers(node.ranks)}", f"device_ids={_join_numbers(node.device_ids)}"]
    return " ".join(words)


def _alias(node: Node) -> str:
    return f"node{node.node_rank}" if ":" in node.name else node.name


def _super_pods(job: Job) -> dict[str, list[Node]]:
    pods: dict[str, list[Node]] = {}
    for node in job.nodes:
        if node.super_pod_id is not None:
            pods.setdefault(node.super_pod_id, []).append(node)
    groups = {f"super_pod_{_NOT_IN_GROUPS.sub('_', pod_id)}": nodes for pod_id, nodes in pods.items()}
    if len(groups) < len(pods):
        message = "two super pod ids become one group name, which has letters, digits and underscores only"
        raise BuildError(message, "give the super pods other ids")
    return groups


def _join_numbers(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


INVENTORY = Exporter(
    "an Ansible inventory",
    _write_inventory,
    frozenset({"device_id", "host_ip", "super_pod_list"}),
    keeps_ranks=True,
)

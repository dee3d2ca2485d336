"""What a format for other launchers is, where each one's module is, and how a table becomes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module

from ranktable.errors import BuildError
from ranktable.export.losses import list_losses
from ranktable.export.nodes import Address, Job, Node, follows_nodes, list_nodes, refuse_host_ranks
from ranktable.model import Device, RankTable, Server

_EXPORTERS = {
    "deepspeed": ("hostfiles", "DEEPSPEED"),
    "openmpi": ("hostfiles", "OPENMPI"),
    "mpich": ("hostfiles", "MPICH"),
    "horovod": ("hostfiles", "HOROVOD"),
    "slurm": ("hostfiles", "HOSTLIST"),
    "slurm-hostfile": ("hostfiles", "HOSTFILE"),
    "torchrun": ("torchrun", "TORCHRUN"),
    "env": ("torchrun", "NODES"),
    "env-rank": ("torchrun", "RANKS"),
    "accelerate": ("torchrun", "ACCELERATE"),
    "ansible": ("ansible", "INVENTORY"),
}
"""Module and name of each `Exporter`. Loaded when it is first asked for."""


@dataclass(frozen=True, slots=True)
class Exporter:
    """A format: what to call it, how to write it, and what it keeps of a table."""

    title: str
    render: Callable[[Job], dict[str, str]]
    """The text of each file by its name; a format of one file has one without a name."""
    keeps: frozenset[str] = frozenset()
    """Keys of `ranktable.export.losses` that the format holds."""
    keeps_ranks: bool = False
    """True when it names the rank of each device; False when ranks count up from host to host."""
    find_losses: Callable[[Job], tuple[str, ...]] = lambda _job: ()
    """What else it cannot hold of this job."""


@dataclass(frozen=True, slots=True)
class Export:
    """A table in the format of another launcher."""

    files: Mapping[str, str]
    """The text of each file by its name; a format of one file has one without a name."""
    lost: tuple[str, ...]
    """What the table says and the format cannot, in words."""
    invented: tuple[str, ...] = ()
    """What the format demands and the table does not say, in words."""
    is_renumbered: bool = False
    """True when the ranks of the format are not those of the table."""

    @property
    def is_folder(self) -> bool:
        """True when the format is several files."""
        return "" not in self.files

    @property
    def text(self) -> str:
        """The whole as one text, with the name of each file before it as a comment when there are several."""
        return "".join(f"# {name}\n{text}" if name else text for name, text in self.files.items())


def export_names() -> tuple[str, ...]:
    """Return the short names of the formats."""
    return tuple(_EXPORTERS)


def exporter_of(name: str) -> Exporter:
    """Return the format of that short name; raises BuildError."""
    if name not in _EXPORTERS:
        raise BuildError(f"format {name!r} is not known", f"choose one of {', '.join(_EXPORTERS)}")
    module, attribute = _EXPORTERS[name]
    exporter: Exporter = getattr(import_module(f"ranktable.export.{module}"), attribute)
    return exporter


def export_table(
    table: RankTable,
    to: str,
    *,
    address: Address = "server_id",
    master_port: int = 29500,
    command: tuple[str, ...] = ("train.py",),
    device_target: str = "ascend",
    renumber: bool = False,
) -> Export:
    """Return `table` in the format `to` (one of `export_names()`), with a list of what the format cannot hold.

    `address` names the key that gives the names of the hosts; `master_port`, `command` (script and arguments) and
    `device_target` ("ascend", "gpu", "cpu") stand in the formats that have a place for them. A format that numbers
    the ranks itself is refused for a table with other ranks, unless `renumber`. Raises BuildError.
    """
    exporter = exporter_of(to)
    nodes = list_nodes(table, address)
    if "device_id" in exporter.keeps:
        refuse_host_ranks(table)
    needs_renumbering = not exporter.keeps_ranks and not follows_nodes(nodes)
    if needs_renumbering and not renumber:
        message = f"{exporter.title} numbers the ranks host by host, which the ranks of this table do not follow"
        raise BuildError(message, "give --renumber to have them numbered so")
    if needs_renumbering:
        nodes = _renumber(nodes)
    job = Job(nodes, master_port, command, device_target)
    ordered = replace(table, servers=tuple(replace(server, devices=_by_rank(server)) for server in table.servers))
    lost = (*list_losses(ordered, exporter.keeps | {address}), *exporter.find_losses(job))
    return Export(exporter.render(job), lost, _find_invented(table, address), needs_renumbering)


def _find_invented(table: RankTable, address: Address) -> tuple[str, ...]:
    if table.dialect == "2.0" and address == "server_id":
        return ("the names of the hosts: a version 2.0 table has none, so they are its net_instance_ids",)
    return ()


def _renumber(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the hosts with ranks that count up from host to host."""
    ranks = iter(range(sum(len(node.devices) for node in nodes)))
    return tuple(
        replace(node, devices=tuple(replace(device, rank_id=next(ranks)) for device in node.devices)) for node in nodes
    )


def _by_rank(server: Server) -> tuple[Device, ...]:
    return tuple(sorted(server.devices, key=lambda device: device.rank_id))

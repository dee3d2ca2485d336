"""Look at this host: processors that may be used, accelerators that are visible."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from msrun.agent.host.accelerators import read_gpus, read_npus
from msrun.agent.host.installed import installed_version
from msrun.agent.host.topology import read_topology
from msrun.planning.placement.host import HostFacts
from msrun.planning.placement.visible_devices import ASCEND_VARIABLE, CUDA_VARIABLE, visible_ascend, visible_cuda

LOOPBACK = "127.0.0.1"


def read_host_facts(environ: Mapping[str, str], root: Path = Path("/")) -> HostFacts:
    """Return what the planner needs of this host. Opens no device and imports no vendor library.

    A preset CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES is honoured: only what it makes visible counts.

    Args:
        environ: the environment of the workers, as far as it is known.
        root: the file system to read /dev, /proc and /sys of.
    """
    gpus, npus = read_gpus(root), read_npus(root)
    visible_gpus = visible_cuda(environ.get(CUDA_VARIABLE), gpus)
    visible_npus = visible_ascend(environ.get(ASCEND_VARIABLE), npus)
    nodes = {target: {d.number: d.node for d in found} for target, found in (("gpu", gpus), ("ascend", npus)) if found}
    topology = read_topology(root, device_nodes=nodes)
    return HostFacts(
        name=socket.gethostname(),
        address=LOOPBACK,
        cpus=topology.allowed,
        gpus=visible_gpus.names,
        npus=visible_npus.names,
        gpus_reason=visible_gpus.reason,
        npus_reason=visible_npus.reason,
        topology=topology,
        has_torch=find_spec("torch") is not None,
        mindspore_version=installed_version("mindspore"),
    )

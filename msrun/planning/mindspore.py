"""Which `mindspore` the workers import: MindSpore itself, or msrun.mindspore, which runs such scripts on torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msrun import contract
from msrun.errors import UsageError
from msrun.planning.imports import imports_package
from msrun.planning.placement.host import HostFacts
from msrun.planning.spec import LaunchSpec
from ranktable.hosts.host_list import MAX_PORT

OURS = "msrun.mindspore"
POSING_FOLDER = Path(__file__).parents[1] / "mindspore" / "posing"
"""On PYTHONPATH it makes `import mindspore` find msrun.mindspore, after everything that stands there already."""


def settle_mindspore(spec: LaunchSpec, host: HostFacts) -> LaunchSpec:
    """Return what is asked of a host with `mindspore` decided: "none" when the script is not seen to import it.

    Raises:
        UsageError: --mindspore names one that is not installed.
    """
    if spec.mindspore == "real" and not host.mindspore_version:
        raise UsageError("--mindspore real: this Python has no mindspore; pip install mindspore, or leave it out")
    if spec.mindspore == "torch" and not host.has_torch:
        raise UsageError("--mindspore torch: this Python has no torch; pip install 'msrun[runtime]'")
    if spec.mindspore_semantics == "torch" and spec.mindspore == "real":
        raise UsageError("--mindspore_semantics torch with --mindspore real: MindSpore has its own; leave one out")
    if spec.mindspore != "auto":
        return spec
    if not any(imports_package(file, "mindspore") for file in spec.program.files(spec.working_directory)):
        return replace(spec, mindspore="none")
    has_real = host.mindspore_version and spec.mindspore_semantics == "mindspore"
    return replace(spec, mindspore="real" if has_real else "torch" if host.has_torch else "none")


def mindspore_environment(spec: LaunchSpec, caller: Mapping[str, str]) -> dict[str, str]:
    """Return what workers, and the process that they are forked from, need of the environment for their mindspore."""
    if spec.mindspore == "real":
        return {contract.MS_TOPO_TIMEOUT: str(spec.cluster_time_out_s)}
    semantics = {contract.MSRUN_MINDSPORE_SEMANTICS: "torch"} if spec.mindspore_semantics == "torch" else {}
    if spec.mindspore == "torch":
        before = {**caller, **dict(spec.env)}.get("PYTHONPATH", "")
        path = os.pathsep.join([before, str(POSING_FOLDER)] if before else [str(POSING_FOLDER)])
        return {"PYTHONPATH": path, **semantics}
    return semantics


def mindspore_port(store_port: int) -> int:
    """Return where MindSpore's scheduler listens beside torch's store; 0 = not known yet.

    Raises:
        UsageError: there is no port after it.
    """
    if store_port == MAX_PORT:
        raise UsageError(
            f"--master_port {store_port}: MindSpore's scheduler needs the next one, too; give a lower port"
        )
    return store_port + 1 if store_port else 0


def mindspore_scheduler(spec: LaunchSpec, node_rank: int) -> dict[str, str]:
    """Return the variables of MindSpore's scheduler on this host; empty where it has none."""
    if spec.mindspore != "real" or node_rank:
        return {}
    return {contract.MS_ROLE: contract.ROLE_SCHEDULER, contract.MS_NODE_ID: "sched", contract.RANK_ID: "0"}


def mindspore_note(spec: LaunchSpec, host: HostFacts) -> list[str]:
    """Return in one line which one it is; nothing where no script asks for it."""
    if spec.mindspore == "real":
        return [f"mindspore {host.mindspore_version} of this environment; --mindspore torch takes {OURS} instead"]
    if spec.mindspore == "torch":
        return [f"mindspore is {OURS}, on torch" + ("" if host.mindspore_version else "; mindspore is not installed")]
    return []

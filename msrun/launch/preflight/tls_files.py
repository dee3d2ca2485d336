"""The check of the files behind --tls_config on this host."""

from __future__ import annotations

from collections.abc import Mapping

from msrun.errors import MsrunError
from msrun.launch.preflight.finding import Finding
from msrun.planning.spec import LaunchSpec


def look_at_tls(spec: LaunchSpec, _caller: Mapping[str, str]) -> Finding:
    """Read and try what this host needs for TLS: its client certificate, and the server's where the scheduler runs.

    Raises:
        UsageError: a file or password is missing or wrong, or the other side would refuse it.
    """
    if not spec.is_several:
        return Finding("ok", "tls", "not needed: the job has one host")
    if spec.tls is None:
        return Finding("ok", "tls", "off: what hosts and scheduler say is not encrypted; --tls_config turns it on")
    from msrun.cluster.tls.identity import open_identity

    identities = [open_identity(spec.tls, "client")]
    if _has_scheduler(spec):
        identities.append(open_identity(spec.tls, "server"))
    warnings = dict.fromkeys(line for identity in identities for line in identity.warnings)
    text = "; ".join(warnings) or ", ".join(identity.describe() for identity in identities)
    return Finding("warn" if warnings else "ok", "tls", text)


def _has_scheduler(spec: LaunchSpec) -> bool:
    from msrun.cluster.addresses import resolve_address
    from msrun.launch.rendezvous import has_scheduler

    try:
        return has_scheduler(spec, resolve_address(spec.master_addr))
    except MsrunError:  # told by the check of master_port
        return spec.node_rank == 0

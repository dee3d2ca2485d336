"""Rank tables without a finding, for tests that break one thing in them, and what is found in a table."""

import copy
import json
from pathlib import Path

import yaml

from ranktable.document import parse_document
from ranktable.profile import build_profile
from ranktable.validate import validate_document

CATALOGUE = Path(__file__).parents[1] / "unit" / "ranktable" / "catalogue"
"""A folder of it holds tables and one `expected.yaml`: per table why it is there, the options that it is checked with,
`mode`, the permissions that the file has, its findings as [rule, severity, path, line], and `ready: false`. A table
that is not judged at all has `error` in place of findings: the name of the exception."""
EXPECTED = {
    f"{listing.parent.name}/{name}": expected
    for listing in sorted(CATALOGUE.glob("*/expected.yaml"))
    for name, expected in yaml.load(listing.read_text(encoding="utf-8"), yaml.CSafeLoader).items()
}
GOOD = [CATALOGUE / name for name, expected in EXPECTED.items() if expected.get("findings") == []]


def problems_of(value, **options):
    """Return what is found in a table; the options are those of `build_profile`."""
    return validate_document(parse_document(json.dumps(value).encode(), "t.json"), build_profile(**options)).problems


def findings(value, **options):
    """Return (rule, severity, path) of every finding."""
    return [(problem.rule, problem.severity, problem.path) for problem in problems_of(value, **options)]


def change(value, *places):
    """Return the table with members replaced, or removed where the new value is None."""
    changed = copy.deepcopy(value)
    for path, member in places:
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        if member is None:
            del holder[path[-1]]
        else:
            holder[path[-1]] = member
    return changed


def plain_table(num_servers=2, num_devices=2, **server):
    """Return a table that every reader of version 1.0 takes on A2."""
    return {
        "version": "1.0",
        "server_count": str(num_servers),
        "server_list": [
            {
                "server_id": f"10.0.{place}.1",
                "container_ip": f"10.1.{place}.1",
                **server,
                "device": [
                    {
                        "device_id": str(number),
                        "device_ip": f"10.2.{place}.{number + 1}",
                        "rank_id": str(place * num_devices + number),
                    }
                    for number in range(num_devices)
                ],
            }
            for place in sorted(range(num_servers), key=str)
        ],
        "status": "completed",
    }


def sdid(server, device_id):
    """Return the super device id of a device of an A3 server."""
    return str(server << 22 | device_id // 2 << 18 | device_id % 2 << 16 | device_id)


def super_pod_table(num_servers=4, per_pod=2, num_devices=4):
    """Return a table of super pods without a finding."""
    ids = [f"10.0.0.{server + 1}" for server in range(num_servers)]
    return {
        "version": "1.2",
        "server_count": str(num_servers),
        "server_list": [
            {
                "server_id": server_id,
                "device": [
                    {
                        "device_id": str(number),
                        "super_device_id": sdid(server % per_pod, number),
                        "device_ip": f"192.168.{server}.{number + 1}",
                        "rank_id": str(server * num_devices + number),
                    }
                    for number in range(num_devices)
                ],
            }
            for server, server_id in enumerate(ids)
        ],
        "super_pod_list": [
            {"super_pod_id": str(pod), "server_list": [{"server_id": name} for name in ids[first : first + per_pod]]}
            for pod, first in enumerate(range(0, num_servers, per_pod))
        ],
        "status": "completed",
    }

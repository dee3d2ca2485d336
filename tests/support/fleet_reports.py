"""Made reports of hosts that are as they should be, for tests that change one thing in them."""

from dataclasses import replace

from msrun.cluster.host_report import Finding, HostAddress, HostReport
from msrun.errors import MsrunError
from msrun.launch.preflight.fleet_checks import HostAnswer, LauncherFacts
from msrun.planning.hosts import HostEntry
from msrun.planning.program import Program

SOURCES = (("train.py", "12ab34cd" * 8), ("model.py", "77" * 32))
LAUNCHER = LauncherFacts(Program("script", "/home/me/train.py"), "0.1.0", sources=SOURCES)


def make_entries(count, **changes):
    """Return hosts h1, h2, ... or h01, h02, ... of more than nine."""
    width = len(str(count))
    return [HostEntry(f"h{number:0{width}}", 4, (0, 1, 2, 3), **changes) for number in range(1, count + 1)]


def make_report(node, **changes):
    """Return the report of a good host."""
    report = HostReport(
        host_name=f"machine{node}",
        python_version="3.11.7",
        msrun_version="0.1.0",
        torch_version="2.13.0+cpu",
        numpy_version="2.1.0",
        architecture="x86_64",
        boot_id=f"boot-{node}",
        device_target="cpu",
        received_at=1000.1,
        made_at=1000.2,
        sources=SOURCES,
        addresses=(HostAddress(f"10.0.0.{node + 1}", "eth0", 24),),
        findings=(Finding("ok", "memory", f"{60 + node}.5 GiB free, 15.1 GiB for each of 4 workers"),),
    )
    return replace(report, **changes)


def make_answer(node, **changes):
    """Return the answer of a good host, 0.3 s after the question."""
    return HostAnswer(make_report(node, **changes), 1000.0, 1000.3, f"10.0.0.{node + 1}")


def make_answers(count, odd=None):
    """Return answers of `count` hosts; of those in `odd`, with other fields or an error in their place."""
    answers = {}
    for node in range(count):
        change = (odd or {}).get(node, {})
        answers[node] = change if isinstance(change, MsrunError) else make_answer(node, **change)
    return answers

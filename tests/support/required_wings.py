"""REQUIRE=hosts,mpirun,slurm,cgroup,zoo,mindspore,helm,kubectl: tests of these wings fail instead of being skipped.

A machine without network namespaces, mpirun, Slurm or a memory cgroup skips what needs them. CI sets REQUIRE, so that a
wing cannot drop out of its tests unnoticed.
"""

import os
import re

import pytest

WINGS = {
    "hosts": r"cannot make hosts|there is no ssh",
    "mpirun": r"no mpirun",
    "slurm": r"no slurm",
    "cgroup": r"no memory cgroup",
    "zoo": r"not installed: pip install .*zoo",
    "helm": r"no helm",
    "kubectl": r"no kubectl",
    "mindspore": r"no Python that has MindSpore",
}
"""Wing -> what its tests say when they are skipped."""


def required():
    """Return the wings that REQUIRE names."""
    wanted = [word.strip() for word in os.environ.get("REQUIRE", "").split(",") if word.strip()]
    unknown = [word for word in wanted if word not in WINGS]
    if unknown:
        raise pytest.UsageError(f"REQUIRE: no such wing: {', '.join(unknown)}; there are {', '.join(WINGS)}")
    return wanted


def fail_if_required(report, wanted):
    """Make a skipped test a failed one when its reason is that of a wing that is wanted."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    for wing in wanted:
        if re.search(WINGS[wing], reason):
            report.outcome = "failed"
            report.longrepr = f"{reason}; REQUIRE={wing} does not let it be skipped"
            return


def pytest_sessionstart():
    required()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    fail_if_required(report, required())
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    fail_if_required(report, required())
    return report

"""Plugin of pytest: says which test runs, and picks the tests of a list, in its order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(os.environ["REACH_FOLDER"])
LIST = os.environ.get("REACH_TESTS")
"""File with the tests that are to run; without it all do."""
CASES = 1
"""Of an end-to-end test that starts a job for each of its cases, so many run."""
_took: dict[str, float] = {}
_failed: set[str] = set()


def _begin(name: str) -> None:
    """From now on what is reached, here or in a process that is started, is reached by this test."""
    os.environ["REACHED_BY"] = name
    (FOLDER / f"now-{os.getpid()}").write_text(name)
    for package in ("msrun", "msrun.runtime", "ranktable"):
        recorder = sys.modules.get(f"{package}.reached_blocks")
        if recorder is not None:
            recorder.begin(name)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Tables of cases are made while a file is read."""
    if isinstance(collector, pytest.Module):
        _begin(collector.nodeid)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A fixture may serve the whole file."""
    _begin(item.nodeid.partition("::")[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """A job that is started for the whole file is started by the first test that asks for its result."""
    name = item.nodeid
    _begin(name.partition("::")[0] if "msrun_of_module" in getattr(item, "fixturenames", ()) else name)


@pytest.hookimpl(optionalhook=True)
def pytest_on_rank(item: pytest.Function) -> None:
    """What tests of a module keep for each other is made anew for each."""
    _begin(item.nodeid)
    for value in vars(item.module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of the list, or of every end-to-end test a few of its cases."""
    if LIST is None:
        count: dict[str, int] = {}
        for item in list(items):
            name = item.nodeid.partition("[")[0]
            count[name] = count.get(name, 0) + 1
            is_cheap = "msrun_of_module" in item.fixturenames or item.get_closest_marker("on_ranks")
            if name.startswith("tests/e2e/") and count[name] > CASES and not is_cheap:
                items.remove(item)
        return
    places = {name: place for place, name in enumerate(json.loads(Path(LIST).read_text()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
    items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid
    _took[name] = _took.get(name, 0.0) + report.duration
    if not report.passed:
        _failed.add(name)
    if report.when == "teardown":
        has_passed = name not in _failed
        with (FOLDER / f"tests-{os.getpid()}").open("a") as file:
            file.write(json.dumps([name, round(_took[name], 3), has_passed]) + "\n")

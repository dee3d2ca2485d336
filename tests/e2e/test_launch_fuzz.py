"""Noise for everything that reads what a stranger or another host has sent: no exception leaves it.

MSRUN_FUZZ_MESSAGES and MSRUN_FUZZ_SEED (by default 330 and 1) say how many pieces of noise, shared by all targets, and
which. A failure names the target and the case; the same seed and number repeat it.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from fuzz import agents, peers

# Read when the tests are collected: the fixtures clear what belongs to jobs.
MESSAGES = int(os.environ.get("MSRUN_FUZZ_MESSAGES", "330"))
SEED = os.environ.get("MSRUN_FUZZ_SEED", "1")
SECONDS_A_CASE = 0.2
MORE_BYTES = 64 << 20
"""What a process may grow by in the course of one target, whatever the number of cases."""

TARGETS: dict[str, Callable[[Iterator[Random], Path], Iterator[None]]] = {
    target.__name__: target
    for target in (
        peers.strangers,
        peers.registrations,
        peers.schedulers,
        peers.handshakes,
        peers.joiners,
        agents.launchers,
        agents.launcher_ends,
    )
}
SHARE = -(-MESSAGES // len(TARGETS))

pytestmark = [pytest.mark.random, pytest.mark.timeout(60 + SHARE * SECONDS_A_CASE)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory, without an agent for keys."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = tmp_path / "files"
    folder.mkdir()
    return folder


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", TARGETS)
def test_noise_is_refused_and_costs_nothing(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: escaped.append(f"{args.thread}: {args.exc_value!r}"))
    case = -1

    def generators() -> Iterator[Random]:
        nonlocal case
        for case in range(SHARE):
            yield Random(f"{SEED}/{name}/{case}")

    before = 0, 0
    try:
        for index, _ in enumerate(TARGETS[name](generators(), home)):
            if index == SHARE // 10:  # what is imported and kept by then is not what grows
                gc.collect()
                before = peak_bytes(), descriptors()
            if index == SHARE - 1:
                gc.collect()
                assert descriptors() <= before[1] + 150, "descriptors stay open"
    except Exception as error:
        raise AssertionError(f"MSRUN_FUZZ_SEED={SEED}, {name}, case {case}: {error!r}") from error
    assert not escaped, escaped
    grown = peak_bytes() - before[0]
    print(f"{name}: {SHARE} cases, {grown >> 10} KiB more, {descriptors()} descriptors")
    assert grown < MORE_BYTES, f"{grown >> 20} MiB more than after a tenth of the cases"

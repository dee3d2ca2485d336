"""Wait statuses in words and numbers."""

from __future__ import annotations

import signal

import pytest

from msrun.agent.processes.process_control import describe_status, exit_code_of, signal_name


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [
        (0, "exit code 0", 0),
        (7 << 8, "exit code 7", 7),
        (255 << 8, "exit code 255", 255),
        (signal.SIGKILL, "signal SIGKILL", 137),
        (signal.SIGSEGV | 0x80, "signal SIGSEGV", 139),  # with a core dump
        (signal.SIGTERM, "signal SIGTERM", 143),
        (40, "signal 40", 168),  # a real-time signal without a name
    ],
)
def test_status_is_described_as_a_shell_counts_it(status: int, words: str, code: int) -> None:
    assert describe_status(status) == words
    assert exit_code_of(status) == code


def test_signal_without_a_name_keeps_its_number() -> None:
    assert (signal_name(9), signal_name(40)) == ("SIGKILL", "signal 40")

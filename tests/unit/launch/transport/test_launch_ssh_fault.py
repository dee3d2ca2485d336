"""What paramiko's exceptions say, in one line."""

from __future__ import annotations

import pytest

from msrun.launch.transport.ssh.target import reason_of


class Refusal(Exception):
    """As paramiko's ChannelException: the server's words are in `text`."""

    text = "administratively prohibited."


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("no route to host"), "no route to host"),
        (Refusal(2, "opening failed"), "administratively prohibited"),
        (EOFError(), "connection closed"),
        (ValueError("first line.\nsecond line"), "first line"),
    ],
)
def test_reason_of_a_fault_is_one_line(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason

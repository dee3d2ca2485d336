"""Lists of exit statuses on the command line."""

from __future__ import annotations

import pytest

from msrun.errors import UsageError
from msrun.planning.spec import check_statuses, parse_statuses


def test_statuses_and_names_of_signals_are_understood() -> None:
    assert parse_statuses("--restart_on", "75, SIGTERM,kill,137") == (75, 143, 137)
    assert parse_statuses("--restart_on", "") == ()


@pytest.mark.parametrize("text", ["0", "256", "TERMINATE", "1,,2", "-1", "1-3", "9" * 5000, "\u0663"])
def test_what_is_no_status_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--restart_on .* is neither an exit status from 1 to 255 nor a signal"):
        parse_statuses("--restart_on", text)


def test_lists_that_contradict_each_other_or_nobody_asks_are_refused() -> None:
    with pytest.raises(UsageError, match="both name 7"):
        check_statuses((7, 9), (7,), 1)
    with pytest.raises(UsageError, match="--max_restarts 0"):
        check_statuses((7,), (), 0)

"""When parameters may live on servers, and what is said when they may not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from msrun import contract
from msrun.errors import UsageError
from msrun.runtime import get_ps_context, init, release, reset_ps_context, set_param_ps, set_ps_context


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (contract.MSRUN_SERVER_TOKEN, contract.MS_SERVER_NUM):
        monkeypatch.delenv(name, raising=False)
    yield
    reset_ps_context()
    release()


def test_context_keeps_what_was_set_until_it_is_reset() -> None:
    set_ps_context(enable_ps=True, staleness=2)
    assert (get_ps_context("enable_ps"), get_ps_context("staleness")) == (True, 2)
    reset_ps_context()
    assert (get_ps_context("enable_ps"), get_ps_context("staleness")) == (False, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"enable_ps": 1}, "enable_ps=1): must be True or False"),
        ({"staleness": -1}, "staleness=-1): must be a whole number, 0 or more"),
        ({"stalenes": 1}, "did you mean staleness"),
        ({"enable_ssl": True}, "leave it out; connections to parameter servers are not encrypted"),
    ],
)
def test_wrong_words_are_refused(words: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        set_ps_context(**words)
    assert said in str(caught.value)


def test_what_is_missing_is_named_one_after_the_other() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"before init\(\): call init\(\) first"):
        set_param_ps(layer)
    init()
    with pytest.raises(UsageError, match=r"without set_ps_context\(enable_ps=True\)"):
        set_param_ps(layer)
    set_ps_context(enable_ps=True)
    with pytest.raises(UsageError, match="in a job without parameter servers: start it with msrun --server_num"):
        set_param_ps(layer)

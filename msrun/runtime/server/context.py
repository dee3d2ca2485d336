"""Whether this job trains with parameter servers, in MindSpore's words: set_ps_context and what belongs to it."""

from __future__ import annotations

from typing import Any

from msrun.errors import UsageError, near_miss

_DEFAULTS: dict[str, Any] = {"enable_ps": False, "staleness": 0, "vocab_cache_size": 0}
_ELSEWHERE = {
    "config_file_path": "msrun's options take its place",
    "scheduler_manage_port": "msrun --status shows the job",
    "enable_ssl": "connections to parameter servers are not encrypted",
    "client_password": "servers and workers prove with a token of the job who they are",
    "server_password": "servers and workers prove with a token of the job who they are",
}
"""MindSpore's other words -> why they are not needed."""
_chosen: dict[str, Any] = {}


def set_ps_context(**words: Any) -> None:
    """Say that parameters may live on parameter servers. Every rank calls it before `set_param_ps`.

    Args:
        words: `enable_ps`, True or False. `staleness` (not in MindSpore): how many steps a worker may be ahead of the
            slowest one; 0, the default, trains as one process does. `vocab_cache_size` (in MindSpore a setting of its
            EmbeddingLookup): how many rows of each table a worker keeps beside its device, those looked up last; it
            pulls a row again when steps that it may not lack have been made since. 0, the default: none. The last two
            hold for the `set_param_ps` that follow.

    Raises:
        UsageError: an unknown word, or a value out of its range.
    """
    for word, value in words.items():
        if word in _ELSEWHERE:
            raise UsageError(f"set_ps_context({word}=...): leave it out; {_ELSEWHERE[word]}")
        _check_word("set_ps_context", word)
        if word == "enable_ps" and not isinstance(value, bool):
            raise UsageError(f"set_ps_context(enable_ps={value!r}): must be True or False")
        if word in ("staleness", "vocab_cache_size") and (type(value) is not int or value < 0):
            raise UsageError(f"set_ps_context({word}={value!r}): must be a whole number, 0 or more")
    _chosen.update(words)


def get_ps_context(attr_key: str) -> Any:
    """Return what was set for a word, or its default.

    Raises:
        UsageError: an unknown word.
    """
    _check_word("get_ps_context", attr_key)
    return _chosen.get(attr_key, _DEFAULTS[attr_key])


def reset_ps_context() -> None:
    """Put every word back to its default; parameters on servers stay there."""
    _chosen.clear()


def _check_word(function: str, word: str) -> None:
    if word not in _DEFAULTS:
        raise UsageError(
            f"{function}({word!r}): unknown word{near_miss(word, _DEFAULTS)}; known are {', '.join(_DEFAULTS)}"
        )

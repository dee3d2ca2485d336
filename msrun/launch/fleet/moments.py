"""Which moments an agent may tell of, and what belongs to each: nothing else that a host says reaches the observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msrun.cluster.membership import WorkerState

MAX_TEXT = 4096
MAX_ITEMS = 1 << 16
MAX_NUMBER = 1 << 40


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} is no text")
    return value[:MAX_TEXT]


def _number(value: object) -> int:
    if type(value) is not int or not -MAX_NUMBER < value < MAX_NUMBER:
        raise ValueError(f"a {type(value).__name__} is no number, or it is too large")
    return value


def read_seconds(value: object) -> float:
    """Return a finite number of seconds.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise ValueError(f"a {type(value).__name__} is no number of seconds")
    return float(value)


def read_list(value: object) -> list[Any]:
    """Return a list that is not too long.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise ValueError(f"a {type(value).__name__} is no list, or it is too long")
    return value


def _state(value: object) -> str:
    return WorkerState(value).value


def _list_of(read: Callable[[object], Any]) -> Callable[[object], Any]:
    def read_all(value: object) -> list[Any]:
        return [read(item) for item in read_list(value)]

    return read_all


def _bytes_by_rank(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_ITEMS:
        raise ValueError(f"a {type(value).__name__} is no object, or it is too long")
    return {str(_number(int(rank))): _number(count) for rank, count in value.items()}


FIELDS: Mapping[str, Mapping[str, Callable[[object], Any]]] = {
    "preparing": {"preload": _list_of(_text)},
    "ready": {"start_method": _text, "reason": _text, "prepare_s": read_seconds},
    "scheduler": {"pid": _number},
    "server": {"index": _number, "pid": _number},
    "started": {"global_rank": _number, "pid": _number},
    "running": {"world_size": _number},
    "exited": {"global_rank": _number, "how": _text, "status": _number, "state": _state},
    "signal": {"name": _text, "global_ranks": _list_of(_number)},
    "hang": {"reason": _text, "lagging": _list_of(_number)},
    "log_lost": {"reason": _text, "lost_bytes": _bytes_by_rank},
    "note": {"text": _text},
    "lingering": {"global_rank": _number, "what": _text},
    "waiting": {"text": _text},
    "stopping": {"reason": _text},
    "restarting": {"attempt": _number, "delay_s": read_seconds, "reason": _text, "global_ranks": _list_of(_number)},
    "over": {"reason": _text},
}
"""Moment -> its fields, as `agent.supervisor` tells them, each with what reads it."""


def read_moment(kind: str, value: object) -> dict[str, Any]:
    """Return the fields of a moment that a host has told of; those that do not belong to it are left out.

    Raises:
        ValueError: one is missing, or is of another type. KeyError for a moment that there is not.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"the fields of {kind} are a JSON {type(value).__name__}")
    found = {}
    for name, read in FIELDS[kind].items():
        try:
            found[name] = read(value.get(name))
        except ValueError as error:
            raise ValueError(f"{kind}: {name}: {error}") from None
    return found

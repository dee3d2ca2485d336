"""mindspore.log: messages of a process, on standard error, from WARNING on or as GLOG_v says (0 to 4)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

__all__ = ["critical", "debug", "error", "get_level", "get_log_config", "info", "warning"]

_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)
_log = logging.getLogger("mindspore")


def get_level() -> str:
    """Return the level as MindSpore counts it: "0" is DEBUG, "4" CRITICAL."""
    word = os.environ.get("GLOG_v", "2")  # noqa: SIM112 - MindSpore's name
    return word if word in ("0", "1", "2", "3", "4") else "2"


def get_log_config() -> dict[str, Any]:
    """Return the variables that were read."""
    return {"GLOG_v": get_level(), "GLOG_logtostderr": "1"}


def _logger() -> logging.Logger:
    _log.setLevel(_LEVELS[int(get_level())])
    return _log


def _sayer(name: str, words: str) -> Callable[..., None]:
    def say(msg: str, *args: Any, **settings: Any) -> None:
        getattr(_logger(), name)(msg, *args, **settings)

    say.__name__, say.__doc__ = name, words
    return say


debug = _sayer("debug", "Say what helps to find an error.")
info = _sayer("info", "Say what happens.")
warning = _sayer("warning", "Say what may be wrong.")
error = _sayer("error", "Say what is wrong.")
critical = _sayer("critical", "Say why it ends.")

"""mindspore.log: messages of a process, on standard error, from WARNING on or as GLOG_v says (0 to 4)."""

from __future__ import annotations

import logging
import os
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


def debug(msg: str, *args: Any, **settings: Any) -> None:
    """Say what helps to find an error."""
    _logger().debug(msg, *args, **settings)


def info(msg: str, *args: Any, **settings: Any) -> None:
    """Say what happens."""
    _logger().info(msg, *args, **settings)


def warning(msg: str, *args: Any, **settings: Any) -> None:
    """Say what may be wrong."""
    _logger().warning(msg, *args, **settings)


def error(msg: str, *args: Any, **settings: Any) -> None:
    """Say what is wrong."""
    _logger().error(msg, *args, **settings)


def critical(msg: str, *args: Any, **settings: Any) -> None:
    """Say why it ends."""
    _logger().critical(msg, *args, **settings)

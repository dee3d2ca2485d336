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


_log.setLevel(logging.DEBUG)
_log.addFilter(lambda record: record.levelno >= _LEVELS[int(get_level())])
debug, info, warning, error, critical = _log.debug, _log.info, _log.warning, _log.error, _log.critical

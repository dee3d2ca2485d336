"""The options that say for whom the result of a command is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ranktable.profile import CHIPS, DEVICE_TARGETS

Command = TypeVar("Command", bound=Callable[..., Any])


def profile_options(command: Command) -> Command:
    """Give a command `--device_target` and `--chip`."""
    target = click.option(
        "--device_target",
        type=click.Choice(DEVICE_TARGETS, case_sensitive=False),
        default="ascend",
        show_default=True,
        help="For which devices to check the result.",
    )
    chip = click.option(
        "--chip",
        type=click.Choice(CHIPS, case_sensitive=False),
        metavar=f"[{'|'.join(CHIPS)}]",
        help="Hold the result to the rules of this chip.",
    )
    return target(chip(command))

"""For whom a table is checked: the kind of device, the chip where it is known, and the program that reads the table.

A rank table does not name its chip: rules of one chip are errors when that chip is asked for, warnings when no chip is
named, and silent when another is. `device_ip` is the address of an accelerator's own network port, which CPU hosts and
GPUs do not have; none may be made up to please a checker.
"""

from __future__ import annotations

from typing import NamedTuple

from ranktable.errors import BuildError

DEVICE_TARGETS = ("ascend", "gpu", "cpu")
CHIPS = ("910a", "a2", "a3", "a5", "300i-duo")
READERS = ("hccl", "mindspore")


class Profile(NamedTuple):
    """A device target ("ascend", "gpu" or "cpu") and, for Ascend, the chip or None, and the reader or None."""

    device_target: str = "ascend"
    chip: str | None = None
    reader: str | None = None
    """One of READERS; None when no reader is named: then the rules that all readers share are checked."""

    @property
    def is_ascend(self) -> bool:
        """True when HCCL is to read the table."""
        return self.device_target == "ascend"

    @property
    def words(self) -> str:
        """What the table is checked for, in words for a report."""
        target = self.chip or self.device_target
        return f"{target} and {self.reader}" if self.reader else target


ANY_TARGET = Profile("any")
"""The rules that hold whatever the devices are: for tables that are made without a word about it."""


def build_profile(device_target: str = "ascend", chip: str | None = None, reader: str | None = None) -> Profile:
    """Return the profile of the names, in any letter case; raises BuildError for others, and for odd pairs."""
    target = _choose("device_target", device_target, DEVICE_TARGETS)
    for name, value in (("chip", chip), ("profile", reader)):
        if value is not None and target != "ascend":
            raise BuildError(f"{name} {value!r} does not go with device_target {target!r}", f"leave the {name} out")
    return Profile(
        target,
        None if chip is None else _choose("chip", chip, CHIPS),
        None if reader is None else _choose("profile", reader, READERS),
    )


def _choose(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value.lower() in choices:
        return value.lower()
    raise BuildError(f"{name} {value!r} is not known", f"choose one of {', '.join(choices)}")

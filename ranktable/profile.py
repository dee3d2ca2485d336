"""For whom a table is checked: the kind of device, and the chip where it is known.

A rank table does not name its chip. Rules that hold for every chip are errors; rules of one chip are errors when
that chip is asked for, warnings when no chip is named, and silent when another is.

`device_ip` is the address of an accelerator's own network port. Ascend devices have one; CPU hosts and GPUs do not,
so for the targets "cpu" and "gpu" a table without it is complete, and none may be made up to please a checker.
"""

from __future__ import annotations

from dataclasses import dataclass

from ranktable.errors import ProfileError
from ranktable.problem import Severity

DEVICE_TARGETS = ("ascend", "gpu", "cpu")
CHIPS = ("910a", "a2", "a3", "300i-duo")


@dataclass(frozen=True, slots=True)
class Profile:
    """A device target ("ascend", "gpu" or "cpu") and, for Ascend, the chip or None."""

    device_target: str = "ascend"
    chip: str | None = None

    @property
    def is_ascend(self) -> bool:
        """True when HCCL is to read the table."""
        return self.device_target == "ascend"

    def severity_on(self, *chips: str) -> Severity | None:
        """Return how bad it is to break a rule of `chips`: None when the rule does not hold for this profile."""
        if not self.is_ascend:
            return None
        if self.chip is None:
            return "warning"
        return "error" if self.chip in chips else None


def build_profile(device_target: str = "ascend", chip: str | None = None) -> Profile:
    """Return the profile of the two names, in any letter case.

    Raises ProfileError for an unknown name, and for a chip together with a target that is not Ascend.
    """
    target = _choose("device_target", device_target, DEVICE_TARGETS)
    if chip is None:
        return Profile(target)
    if target != "ascend":
        raise ProfileError(f"chip {chip!r} does not go with device_target {target!r}", "leave the chip out")
    return Profile(target, _choose("chip", chip, CHIPS))


def _choose(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value.lower() in choices:
        return value.lower()
    raise ProfileError(f"{name} {value!r} is not known", f"choose one of {', '.join(choices)}")

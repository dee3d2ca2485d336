"""Checks of what optimizers are given."""

from __future__ import annotations

from typing import Any

from msrun.errors import StrategyError


def check_number(optimizer: str, name: str, value: Any, *, least: float, most: float | None = None) -> None:
    """Refuse what is no number of at least `least` and, if given, below `most`.

    Raises:
        StrategyError: it is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < least or (most is not None and value >= most):
        limit = f"{least:g} or more" + (f" and below {most:g}" if most is not None else "")
        raise StrategyError(f"{optimizer}({name}={value!r}): must be a number, {limit}")


def adam_settings(optimizer: str, lr: Any, betas: Any, eps: Any, weight_decay: Any) -> dict[str, Any]:
    """Return the settings that all relatives of Adam have, as the defaults of its groups.

    Raises:
        StrategyError: one is out of its range.
    """
    settings = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    for name, value in settings.items():
        check_number(optimizer, name, value, least=0.0)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise StrategyError(f"{optimizer}(betas={betas!r}): must be two numbers")
    for value in betas:
        check_number(optimizer, "betas", value, least=0.0, most=1.0)
    return {**settings, "betas": betas}

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


def check_adam(optimizer: str, lr: Any, betas: Any, eps: Any) -> None:
    """Refuse rates and decays of moments that are out of their range.

    Raises:
        StrategyError: one is.
    """
    check_number(optimizer, "lr", lr, least=0.0)
    check_number(optimizer, "eps", eps, least=0.0)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise StrategyError(f"{optimizer}(betas={betas!r}): must be two numbers")
    for value in betas:
        check_number(optimizer, "betas", value, least=0.0, most=1.0)

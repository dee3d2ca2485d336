"""Fail two functions deep, with a chained cause."""


def inner() -> None:
    raise ValueError("inner wrong")


def outer() -> None:
    try:
        inner()
    except ValueError as error:
        raise RuntimeError("outer wrong") from error


outer()

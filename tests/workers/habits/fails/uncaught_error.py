def inner(value: int) -> float:
    return 1 / value


def outer() -> None:
    try:
        {}["key"]
    except KeyError:
        inner(0)


print("begin")
outer()

import traceback
import warnings


def inner() -> None:
    raise KeyError("x")


try:
    inner()
except KeyError:
    traceback.print_exc()
traceback.print_stack()
warnings.warn("of main", stacklevel=1)
warnings.warn("of main's caller", stacklevel=2)
warnings.warn("of nobody", stacklevel=99)

import sys


class Raises:
    def __del__(self) -> None:
        raise ValueError("in a finalizer")


sys.unraisablehook = lambda args: print("hook:", args.exc_value, args.err_msg)
raises = Raises()
del raises

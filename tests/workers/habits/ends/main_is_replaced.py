import sys
import types

sys.modules["__main__"] = types.ModuleType("__main__")
import __main__  # noqa: E402

print(hasattr(__main__, "sys"))

import importlib.abc
import importlib.util
import sys


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name in ("made_up", "heapq") else None

    def exec_module(self, module) -> None:
        module.VALUE = "made up"


sys.meta_path.insert(0, Finder())
import made_up  # noqa: E402

print(made_up.VALUE)

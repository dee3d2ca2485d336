import gc

gc.collect()


class Node:
    def __init__(self) -> None:
        self.me = self


nodes = [Node() for _ in range(10)]
del nodes
print(gc.collect(), gc.isenabled(), gc.get_threshold())

class Node:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        print("collected", Node.__name__)


node = Node()

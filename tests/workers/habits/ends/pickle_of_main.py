import copy
import dataclasses
import pickle
import typing


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: "int" = 2


class Row(typing.NamedTuple):
    x: int


def function() -> int:
    return 1


data = pickle.dumps([Point(1), Row(2), function])
assert b"__main__" in data
print(pickle.loads(data)[:2], pickle.loads(data)[2](), copy.deepcopy(Point(3)))
print(typing.get_type_hints(Point), Point.__module__, Point.__qualname__)

"""Records: frozen dataclasses whose methods stand in one base class."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, replace

import pytest

from ranktable.record import Record


class Address(Record):
    name: str
    port: int = 0
    token: str = field(default="", repr=False)
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError(self.port)


class Route(Address, kw_only=True):
    via: str


class Count(Record, frozen=False):
    number: int = 0


def test_a_record_is_made_of_words_in_order_and_by_name():
    assert asdict(Address("a", 1, tags=["x"])) == {"name": "a", "port": 1, "token": "", "tags": ["x"]}
    assert asdict(Route("a", via="b")) == {"name": "a", "port": 0, "token": "", "tags": [], "via": "b"}
    assert [one.name for one in fields(Route)] == ["name", "port", "token", "tags", "via"]
    assert Address("a").tags is not Address("a").tags, "none share a default"


@pytest.mark.parametrize(
    ("kind", "args", "named", "wrong"),
    [
        (Address, (), {}, "missing or unknown: name"),
        (Address, ("a",), {"prt": 1}, "missing or unknown: prt"),
        (Address, ("a", 1), {"port": 1}, "given twice"),
        (Address, ("a", 1, "t", [], 5), {}, "too many"),
        (Route, ("a", 1, "t", [], "b"), {}, "via"),
    ],
)
def test_what_makes_no_record_is_refused(kind, args, named, wrong):
    with pytest.raises(TypeError, match=f"{kind.__name__}: fields .*{wrong}"):
        kind(*args, **named)


def test_a_record_never_changes_unless_its_class_says_so():
    address, count = Address("a"), Count()
    for name in ("port", "new"):
        with pytest.raises(FrozenInstanceError, match=rf"Address\.{name}"):
            setattr(address, name, 1)
    with pytest.raises(FrozenInstanceError, match=r"Address\.name"):
        del address.name
    assert address == Address("a")
    count.number += 1
    assert count == Count(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(count)


def test_records_are_equal_by_class_and_fields_and_show_these_but_for_secrets():
    assert Route("a", via="b") == Route(via="b", name="a") != Route("a", via="c")
    assert Address("a") not in (Route("a", via=""), "a")
    a, same = (Address(tags=(), **words) for words in ({"name": "a", "port": 1}, {"port": 1, "name": "a"}))
    assert len({a, same, Address("b", tags=())}) == 2
    assert repr(Address("a", 1, token="secret")) == "Address(name='a', port=1, tags=[])"


def test_a_copy_of_a_record_is_checked_as_the_first():
    address = Address("a", 1)
    assert replace(address, port=2) == Address("a", 2)
    with pytest.raises(ValueError, match="-1"):
        replace(address, port=-1)
    assert pickle.loads(pickle.dumps(address)) == copy.deepcopy(address) == address

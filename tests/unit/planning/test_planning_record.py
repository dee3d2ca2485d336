"""Records: frozen dataclasses whose methods stand in one base class."""

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, field, fields, replace

import pytest

from msrun.planning.record import Record


class Address(Record):
    """A record for these tests."""

    name: str
    port: int = 0
    token: str = field(default="", repr=False)
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError(self.port)


class Route(Address, kw_only=True):
    """One with a field more, which has to be named."""

    via: str


def test_a_record_is_made_of_words_in_order_and_by_name():
    assert asdict(Address("a", 1, tags=["x"])) == {"name": "a", "port": 1, "token": "", "tags": ["x"]}
    assert asdict(Route("a", via="b")) == {"name": "a", "port": 0, "token": "", "tags": [], "via": "b"}
    assert [one.name for one in fields(Route)] == ["name", "port", "token", "tags", "via"]


def test_no_two_records_share_a_default_list():
    assert Address("a").tags is not Address("a").tags


@pytest.mark.parametrize(
    ("args", "named", "wrong"),
    [
        ((), {}, "missing or unknown: name"),
        (("a",), {"prt": 1}, "missing or unknown: prt"),
        (("a", 1), {"port": 1}, "given twice"),
        (("a", 1, "t", [], 5), {}, "too many"),
    ],
)
def test_what_makes_no_record_is_refused(args, named, wrong):
    with pytest.raises(TypeError, match=f"Address: fields .*{wrong}"):
        Address(*args, **named)


def test_the_field_of_a_record_that_has_to_be_named_is_taken_by_name_alone():
    with pytest.raises(TypeError, match="via"):
        Route("a", 1, "t", [], "b")


def test_a_record_never_changes():
    address = Address("a")
    with pytest.raises(FrozenInstanceError, match=r"Address\.port"):
        address.port = 1
    with pytest.raises(FrozenInstanceError, match=r"Address\.new"):
        address.new = 1
    with pytest.raises(FrozenInstanceError, match=r"Address\.name"):
        del address.name
    assert address == Address("a")


class Count(Record, frozen=False):
    """One that may change."""

    number: int = 0


def test_a_record_that_may_change_changes_and_is_no_key():
    count = Count()
    count.number += 1
    assert count == Count(1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(count)


def test_records_are_equal_by_class_and_fields():
    assert Route("a", via="b") == Route(via="b", name="a") != Route("a", via="c")
    assert Address("a") != Route("a", via="")
    assert Address("a") != "a"
    a, same = (Address(tags=(), **words) for words in ({"name": "a", "port": 1}, {"port": 1, "name": "a"}))
    assert len({a, same, Address("b", tags=())}) == 2


def test_a_record_shows_its_fields_but_for_secrets():
    assert repr(Address("a", 1, token="secret")) == "Address(name='a', port=1, tags=[])"


def test_a_copy_of_a_record_is_checked_as_the_first():
    address = Address("a", 1)
    assert replace(address, port=2) == Address("a", 2)
    with pytest.raises(ValueError, match="-1"):
        replace(address, port=-1)
    assert pickle.loads(pickle.dumps(address)) == copy.deepcopy(address) == address

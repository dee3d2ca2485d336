"""A table of any dialect is read back as it was written, and a file is written as it was read."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import Device, RankTable, Server, SuperPod, encode_table, parse_table
from ranktable.tables import encode_document
from ranktable.values import render_json

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda children: st.lists(children, max_size=2) | st.dictionaries(st.text(max_size=5), children, max_size=2),
    max_leaves=4,
)
EXTRAS = st.dictionaries(st.text(max_size=5).map(lambda key: "x_" + key), JSON_VALUES, max_size=2)
TEXTS = st.text(max_size=5)
NAMES = st.text(min_size=1, max_size=5)
NUMBERS = st.integers(0, 10**10 - 1)
OF_32_BITS = st.integers(0, 2**32 - 1)
ADDRESSES = st.none() | st.ip_addresses().map(str)
NOTHING = st.just(())


def some(values, most=3, **options):
    return st.lists(values, min_size=1, max_size=most, **options).map(tuple)


def devices(ids=NUMBERS, address=ADDRESSES, super_id=st.none(), extra=EXTRAS):  # noqa: B008
    return some(st.builds(Device, ids, NUMBERS, address, super_id, extra=extra))


def servers(listed, hosts=st.none() | TEXTS, extra=EXTRAS):  # noqa: B008
    return some(st.builds(Server, TEXTS, listed, hosts, hosts, extra=extra))


IDS = some(TEXTS)
PODS = some(st.builds(SuperPod, TEXTS, IDS, EXTRAS))
SUPER = servers(devices(address=st.none() | TEXTS, super_id=st.none() | TEXTS))


def flat(name, listed, pods=NOTHING, extra=EXTRAS):
    return st.builds(RankTable, st.just(name), listed, TEXTS, st.none() | NUMBERS, pods, extra=extra)


TABLES = {
    "1.0": flat("1.0", servers(devices(address=st.none() | TEXTS))),
    "1.2": flat("1.2", SUPER, NOTHING | PODS),
}


@pytest.mark.parametrize("dialect", TABLES)
def test_a_table_survives_both_ways(dialect):
    @settings(deadline=None, max_examples=40)
    @given(TABLES[dialect])
    def check(table):
        value = encode_document(table)
        assert parse_table(json.dumps(value)) == table
        assert encode_document(parse_table(encode_table(table))) == value

    check()


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_the_layout_does_not_change_the_value(value):
    assert json.loads(render_json(value)) == value

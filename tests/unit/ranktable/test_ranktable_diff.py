"""What two tables say differently, and the digest that is equal when they say the same."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_strategies import faulty_tables, shuffled

from ranktable import (
    Cluster,
    Device,
    Group,
    RankTable,
    Server,
    SuperPod,
    build_table,
    diff_tables,
    digest_table,
)
from ranktable.compare import canonical
from ranktable.report.listing import changes_as_json, render_changes

TWO = build_table([("a", 2), ("b", 2)])


@settings(max_examples=25)
@given(st.data())
def test_a_table_says_the_same_in_any_order_of_its_lists(data):
    table = data.draw(faulty_tables())
    other = data.draw(shuffled(table))
    assert diff_tables(table, other) == ()
    assert digest_table(table) == digest_table(other)


@settings(max_examples=30)
@given(
    faulty_tables(),
    faulty_tables(),
    st.sampled_from(["servers", "status", "super_pods", "clusters", "groups", "extra"]),
)
def test_digests_are_equal_exactly_when_there_is_no_difference(first, other, part):
    second = replace(first, **{part: getattr(other, part)})
    assert (digest_table(first) == digest_table(second)) == (diff_tables(first, second) == ())


@settings(max_examples=20)
@given(faulty_tables(), faulty_tables())
def test_the_difference_the_other_way_is_the_mirror(first, second):
    swapped = {"added": "removed", "removed": "added", "changed": "changed"}

    def view(changes, mirrored):
        return sorted(
            (
                swapped[change.kind] if mirrored else change.kind,
                change.subject,
                change.field,
                *[str(value) for value in ((change.before, change.after)[:: -1 if mirrored else 1])],
                canonical(change.fields),
                change.num_parts,
            )
            for change in changes
        )

    assert view(diff_tables(first, second), mirrored=False) == view(diff_tables(second, first), mirrored=True)


@settings(max_examples=15)
@given(faulty_tables(), faulty_tables())
def test_any_difference_can_be_shown(first, second):
    changes = diff_tables(first, second)
    assert render_changes(changes, "x", "y").isascii()
    assert json.loads(json.dumps(changes_as_json(changes, "x", "y")))["same"] == (not changes)


def _with(server=0, device=None, **values):
    """Return the table of two servers with some values of one server or device replaced."""
    servers = list(TWO.servers)
    if device is None:
        servers[server] = replace(servers[server], **values)
    else:
        devices = list(servers[server].devices)
        devices[device] = replace(devices[device], **values)
        servers[server] = replace(servers[server], devices=tuple(devices))
    return replace(TWO, servers=tuple(servers))


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (_with(device=1, rank_id=7), "~ server a device 1: rank_id 1 -> 7"),
        (_with(device=0, device_ip="10.0.0.1"), '~ server a device 0: device_ip nothing -> "10.0.0.1"'),
        (_with(device=0, super_device_id="5"), '~ server a device 0: super_device_id nothing -> "5"'),
        (_with(device=0, extra={"host_port": "60000"}), '~ server a device 0: host_port nothing -> "60000"'),
        (_with(server=1, host_ip="10.0.0.1"), '~ server b: host_ip nothing -> "10.0.0.1"'),
        (_with(server=1, group="g"), '~ server b: group nothing -> "g"'),
        (_with(server=1, server_id="c"), "+ server c: 2 devices"),
        (_with(server=1, server_id="c"), "- server b: 2 devices"),
        (_with(server=1, devices=(Device(0, 2),)), "- server b device 1: rank_id 3"),
        (
            _with(server=1, devices=(*TWO.servers[1].devices, Device(0, 9))),
            "+ server b device 0 (no. 2 of that number): rank_id 9",
        ),
        (replace(TWO, servers=(*TWO.servers, Server("a", ()))), "+ server a (no. 2 of that name): 0 devices"),
        (replace(TWO, status="initializing"), '~ status "completed" -> "initializing"'),
        (replace(TWO, declared_server_count=None), "~ server_count 2 -> nothing"),
        (replace(TWO, extra={"data_version": 1}), "~ data_version nothing -> 1"),
        (replace(TWO, super_pods=(SuperPod("0", ("a",)),)), "+ super pod 0: 1 server"),
        (replace(TWO, clusters=(Cluster("x", ("a",), ("0",)),)), "+ cluster x: 2 members"),
        (replace(TWO, groups=(Group("g", {"k": 1}),)), "+ group g: k 1"),
    ],
)
def test_every_difference_is_named(other, line):
    assert line in render_changes(diff_tables(TWO, other), "x", "y").splitlines()


def test_a_member_that_moves_between_super_pods_is_named():
    def pods(*members):
        return replace(TWO, super_pods=tuple(SuperPod(str(number), ids) for number, ids in enumerate(members)))

    shown = render_changes(diff_tables(pods(("a", "b"), ()), pods(("a",), ("b",))), "x", "y")
    assert shown.splitlines()[2:] == ["- super pod 0 has server b", "+ super pod 1 has server b", "2 differences"]


def test_what_stands_twice_is_told_apart_by_its_content_not_its_place():
    pods = (SuperPod("0", ("a", "d")), SuperPod("0", ("b", "c")))
    turned = (SuperPod("0", ("d", "a")), SuperPod("0", ("b", "c")))
    assert diff_tables(replace(TWO, super_pods=pods), replace(TWO, super_pods=turned)) == ()
    clusters = [tuple(Cluster("x", pod.server_ids, pod.server_ids) for pod in both) for both in (pods, turned)]
    assert diff_tables(*(replace(TWO, clusters=both) for both in clusters)) == ()


def test_a_member_that_stands_twice_is_a_difference():
    once, twice = (replace(TWO, super_pods=(SuperPod("0", ("a",) * times),)) for times in (1, 2))
    assert render_changes(diff_tables(once, twice), "x", "y").splitlines()[2] == (
        "~ super pod 0 has server a: times nothing -> 2"
    )


def test_the_devices_of_a_server_that_comes_are_counted_not_listed():
    assert len(diff_tables(TWO, _with(server=1, server_id="c"))) == 2


def test_a_key_of_the_file_does_not_hide_one_of_the_model():
    assert render_changes(diff_tables(TWO, _with(device=0, extra={"rank_id": "x"})), "x", "y").splitlines()[2] == (
        '~ server a device 0: extra rank_id nothing -> "x"'
    )


def test_numbers_that_are_equal_in_python_only_are_different():
    for first, second in ((1, True), (1, 1.0), (0, False)):
        assert diff_tables(replace(TWO, extra={"k": first}), replace(TWO, extra={"k": second}))


def test_repeats_are_counted():
    moved = build_table([("a", 97)], order="given")
    other = replace(
        moved, servers=(replace(moved.servers[0], devices=tuple(Device(n, 96 - n) for n in range(97) if n != 48)),)
    )
    lines = render_changes(diff_tables(moved, other), "x", "y").splitlines()
    assert lines[2:4] == ["- server a device 48: rank_id 48", "~ server a device 0: rank_id 0 -> 96"]
    assert lines[-2:] == ["    and 93 more like this", "97 differences"]


def test_the_digest_of_a_table_stays_what_it_is():
    """It is written down and compared later: changing it needs a new salt."""
    assert digest_table(TWO) == "1eab036ab61971764ea59ba086d75aef838bb9ed82a30c1cc61311bb2229b397"
    assert digest_table(RankTable("1.0", ())) != digest_table(TWO)

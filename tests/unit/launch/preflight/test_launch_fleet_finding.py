"""What many hosts have in common is one line, and 64 hosts fit on a screen."""

from __future__ import annotations

import pytest
from fleet_reports import make_entries

from msrun.cluster.protocol import Finding
from msrun.errors import ClusterError, UsageError
from msrun.launch.preflight.finding import (
    describe_finding,
    exit_code_of_findings,
    fleet_error,
    fold_findings,
    name_hosts,
    order_findings,
    render_fleet_findings,
)
from msrun.planning.hosts.host_entry import HostEntry

SIXTEEN = make_entries(16)

FOLDS: list[tuple[dict[int, str], list[str]]] = [
    # node -> text; lines
    ({0: "same", 1: "same", 2: "same"}, ["h[01-03]: same"]),
    (dict.fromkeys(range(16), "same"), ["all 16 hosts: same"]),
    ({0: "same", 1: "other", 2: "same"}, ["h[01,03]: same", "h02: other"]),
    ({0: "41.2 GiB free", 1: "9.9 GiB free", 2: "41.2 GiB free"}, ["h[01-03]: 9.9 to 41.2 GiB free"]),
    ({0: "5 of 8 ok", 1: "6 of 8 ok"}, ["h[01-02]: 5 to 6 of 8 ok"]),
    ({0: "7 GiB free", 1: "512 MiB free"}, ["h01: 7 GiB free", "h02: 512 MiB free"]),
    ({0: "no /disk1", 1: "no /disk2"}, ["h[01-02]: on h01: no /disk1"]),
    ({0: "2.13.0", 1: "2.12.1"}, ["h[01-02]: on h01: 2.13.0"]),
    ({0: "h01: refused", 1: "h02: refused"}, ["h[01-02]: refused"]),
    ({0: "key of h01 is wrong", 1: "key of h02 is wrong"}, ["h[01-02]: key of the host is wrong"]),
    ({4: "key of h05 is wrong"}, ["h05: key of h05 is wrong"]),
    ({4: "h05 (10.0.0.5 port 22): refused"}, ["h05 (10.0.0.5 port 22): refused"]),
    (
        {4: "h05 (10.0.0.5 port 22): refused", 5: "h06 (10.0.0.6 port 22): refused"},
        ["h[05-06]: such as h05 (10.0.0.5 port 22): refused"],
    ),
    ({0: "10.0.0.1 refused", 1: "10.0.0.2 refused"}, ["h[01-02]: on h01: 10.0.0.1 refused"]),
    ({0: "h010 is no h01", 1: "h010 is no h02"}, ["h[01-02]: h010 is no the host"]),
]


@pytest.mark.parametrize(("texts", "lines"), FOLDS)
def test_equal_findings_are_one_line(texts: dict[int, str], lines: list[str]) -> None:
    folded = fold_findings(((node, Finding("warn", "x", text)) for node, text in texts.items()), SIXTEEN)
    assert [describe_finding(finding, SIXTEEN) for finding in folded] == lines


def test_findings_that_differ_in_more_than_text_stay_apart() -> None:
    said = [
        Finding("ok", "a", "x"),
        Finding("warn", "a", "x"),
        Finding("fail", "a", "x", 2),
        Finding("fail", "a", "x", 3),
    ]
    assert len(fold_findings(enumerate(said), SIXTEEN)) == 4


NAMES = [
    (["h1"], [0], "h1"),
    (["h1", "h2"], [0, 1], "all 2 hosts"),
    (["a", "b", "c"], [0, 2], "a,c"),
    ([f"node{number:04}" for number in range(64)], range(1, 64), "node[0001-0063]"),
    ([f"node{number}" for number in range(128)], range(0, 128, 2), "node0, node2, node4 and 61 more hosts"),
    ([f"10.0.0.{number}" for number in range(1, 9)], range(4), "10.0.0.[1-4]"),
]


@pytest.mark.parametrize(("names", "nodes", "text"), NAMES)
def test_hosts_are_named_in_few_words(names: list[str], nodes: list[int], text: str) -> None:
    assert name_hosts(list(nodes), [HostEntry(name, 1, (0,)) for name in names]) == text


def test_failures_come_first_and_quiet_leaves_out_what_is_well() -> None:
    findings = [
        Finding("ok", "memory", "5 GiB free", nodes=(0, 1)),
        Finding("warn", "torch", "h01 has 2.12.0"),
        Finding("fail", "disk", "the disk is full", 2, (3,)),
    ]
    assert render_fleet_findings(order_findings(findings), SIXTEEN) == [
        "fail  disk           h04: the disk is full",
        "warn  torch          h01 has 2.12.0",
        "ok    memory         h[01-02]: 5 GiB free",
    ]
    assert len(render_fleet_findings(findings, SIXTEEN, quiet=True)) == 2


def test_line_of_a_hostile_host_stays_one_line() -> None:
    (line,) = render_fleet_findings([Finding("warn", "x", "a\nok    y              b", nodes=(0,))], SIXTEEN)
    assert "\n" not in line


def test_error_of_a_run_is_the_first_failure_and_counts_the_others() -> None:
    host = Finding("fail", "host", "h02: connection refused", 3)
    disk = Finding("fail", "disk", "the disk is full", 2, (3, 4))
    assert fleet_error([Finding("warn", "x", "y")], SIXTEEN) is None
    error = fleet_error([host], SIXTEEN)
    assert isinstance(error, ClusterError) and (str(error), error.exit_code) == ("h02: connection refused", 3)
    error = fleet_error([host, disk], SIXTEEN)
    assert isinstance(error, UsageError)
    assert (str(error), error.exit_code) == ("h[04-05]: the disk is full (and 1 more; --check shows all)", 2)
    late = fleet_error([Finding("fail", "host", "no answer in time", 124, (1,))], SIXTEEN)
    assert late is not None and late.exit_code == 124


def test_exit_code_is_that_of_what_the_user_has_to_change_first() -> None:
    assert exit_code_of_findings([Finding("ok", "x", ""), Finding("warn", "x", "")]) == 0
    assert exit_code_of_findings([Finding("fail", "x", "", 3), Finding("fail", "x", "", 2)]) == 2

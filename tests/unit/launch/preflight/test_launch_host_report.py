"""What a host says of itself survives the way, and what a hostile one says does no harm."""

from __future__ import annotations

import json

import pytest
from fleet_reports import make_report
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import ClusterError
from msrun.launch.preflight.finding import Finding
from msrun.launch.preflight.host_report import HostAddress, HostReport, printable
from msrun.planning.record_json import encode_record


def travel(report: HostReport) -> HostReport:
    return HostReport.from_json(json.loads(json.dumps(encode_record(report))))


def test_report_comes_as_it_went() -> None:
    report = make_report(
        3,
        findings=(
            Finding("fail", "disk", "full", 2),
            Finding("warn", "torch", "old"),
            Finding("ok", "memory", "5 GiB"),
        ),
        addresses=(
            HostAddress("10.0.0.4", "eth0", 24),
            HostAddress("fd77::4", "eth0", 64),
            HostAddress("1.2.3.4", "w", 0),
        ),
        ssh_client="10.0.0.1",
        ssh_server="10.0.0.4",
        master_address="10.0.0.9",
        sees_log_dir=True,
    )
    assert travel(report) == report


@pytest.mark.parametrize("value", [None, 3, "report", [], [["host_name", "h1"]]])
def test_what_is_no_report_is_refused(value: object) -> None:
    with pytest.raises(ClusterError, match="install the same msrun on all hosts"):
        HostReport.from_json(value)


@pytest.mark.parametrize(
    "change",
    [
        {"host_name": 3},
        {"torch_version": ["2.13"]},
        {"received_at": "soon"},
        {"made_at": True},
        {"made_at": float("nan")},
        {"made_at": 1e300},
        {"made_at": 10**400},
        {"sources": "train.py"},
        {"sources": [["a", "b", "c"], "x", 4]},
        {"addresses": [{"address": "here"}, {"interface": "eth0"}, 7]},
        {"findings": [{"status": "fine", "name": "x", "text": "y"}, {"status": ["ok"]}, None]},
        {"sees_log_dir": "yes"},
        {"of_a_later_version": {}},
    ],
)
def test_field_that_is_none_is_left_empty_and_the_others_stay(change: dict[str, object]) -> None:
    read = HostReport.from_json({**encode_record(make_report(0)), **change})
    field = next(iter(change))
    assert getattr(read, field, None) == getattr(HostReport(), field, None)
    assert read.boot_id == "boot-0"


def test_everything_that_a_host_says_is_cut_to_size() -> None:
    value = {
        "host_name": "h" * 10_000,
        "sources": [["s", "d"]] * 100_000,
        "addresses": [{"address": "10.0.0.1", "interface": "e" * 10_000, "prefix_bits": 24}] * 10_000,
        "findings": [{"status": "fail", "name": "n" * 10_000, "text": "t" * 10_000, "exit_code": 2}] * 10_000,
    }
    assert len(json.dumps(encode_record(HostReport.from_json(value)))) < 100_000


@pytest.mark.parametrize(("given_code", "read_code"), [(2, 2), (3, 3), (0, 3), (77, 3), ("2", 3), (None, 3), ([], 3)])
def test_failure_of_a_host_ends_the_job_whatever_exit_code_it_gives(given_code: object, read_code: int) -> None:
    value = {"findings": [{"status": "fail", "name": "disk", "text": "full", "exit_code": given_code}]}
    assert HostReport.from_json(value).findings == (Finding("fail", "disk", "full", read_code),)


def test_prefix_of_a_network_is_believed_only_if_it_can_be_one() -> None:
    def bits(given: object, address: str = "10.0.0.1") -> int:
        value = {"addresses": [{"address": address, "interface": "eth0", "prefix_bits": given}]}
        return HostReport.from_json(value).addresses[0].prefix_bits

    assert [bits(24), bits(32), bits(33), bits(-1), bits("24"), bits(64, "fd77::1")] == [24, 32, 0, 0, 0, 64]


def test_text_of_a_host_commands_no_terminal() -> None:
    assert printable("a\x1b[2J\nb\u202ec\udc80é☃") == "a\\x1b[2J\\nb\\u202ec\\udc80é☃"
    assert HostReport.from_json({"host_name": "\x1b[31mh1\x07"}).host_name == "\\x1b[31mh1\\x07"


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(encode_record(HostReport()))), ANY_JSON, max_size=6))
def test_no_message_breaks_the_launcher(value: dict[str, object]) -> None:
    read = HostReport.from_json(value)
    assert travel(read) == read
    _ = read.routable, [entry.network for entry in read.addresses]


def test_addresses_of_one_machine_alone_are_not_routable() -> None:
    kinds = ["127.0.0.1", "::1", "169.254.3.4", "fe80::1", "0.0.0.0", "10.0.0.1", "fd77::1", "8.8.8.8"]
    report = HostReport(addresses=tuple(HostAddress(address, "eth0", 0) for address in kinds))
    assert [entry.address for entry in report.routable] == ["10.0.0.1", "fd77::1", "8.8.8.8"]

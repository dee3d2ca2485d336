"""Who may take part in a job of several hosts, and who gets which ranks."""

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrun.cluster.connection import HostRequest, Refused, Registry
from msrun.cluster.messages import pack_hosts, unpack_hosts
from msrun.cluster.protocol import protocol
from msrun.planning.hosts import HostAssignment
from msrun.planning.record import encode_record


def request(node_rank=-1, workers=4, total=12, **changes):
    settings = {"name": "h", "address": f"10.0.0.{node_rank + 2}", "max_restarts": 0}
    return HostRequest(protocol(), total, workers, node_rank, **{**settings, **changes})


def registry(*requests, total=12, **settings):
    found = Registry(total, 0, **settings)
    for number, one in enumerate(requests):
        found.add(number, one)
    return found


@pytest.mark.parametrize(
    ("came", "newcomer", "reason"),
    [
        ([request(0)], request(0, address="10.0.0.9"), "--node_rank 0 is taken by node 0 (h, 10.0.0.2)"),
        ([request(-1, address="10.0.0.2")], request(-1, address="10.0.0.2"), "address 10.0.0.2 is taken by (h,"),
        ([request(0)], request(-1), r"(h, 10.0.0.1) gave no --node_rank, node 0 (h, 10.0.0.2) did"),
        ([request(0)], request(1, total=16), "--worker_num 16, but 12 at the scheduler"),
        ([request(0)], request(1, max_restarts=2), "--max_restarts 2, but 0 at the scheduler"),
        ([request(0)], request(1, table="abc"), "a --rank_table_file than the scheduler"),
        ([request(0)], request(1, workers=9), "only 8 of 12 workers are missing"),
        ([request(0)], request(2, workers=8), "with it all 12 workers are there, but the hosts are 0, 2"),
        ([request(0), request(1, 8)], request(2), "an extra host: the job is complete with 12 workers on 2 hosts"),
    ],
)
def test_host_that_does_not_fit_is_refused_and_changes_nothing(came, newcomer, reason):
    found = registry(*came)
    before = found.registered, found.describe_present()
    with pytest.raises(Refused) as refusal:
        found.add("new", newcomer)
    assert reason in str(refusal.value)
    assert (found.registered, found.describe_present()) == before


@pytest.mark.parametrize(
    ("came", "missing"),
    [
        ([request(0)], "4 of 12 registered, missing: ranks 4-11, from node 1 on"),
        ([request(0), request(2)], "8 of 12 registered, missing: 4 workers, among them those of node 1"),
        ([request(-1)], "4 of 12 registered, missing: 8 workers"),
    ],
)
def test_missing_hosts_are_told_as_far_as_they_are_known(came, missing):
    assert registry(*came).describe() == missing


def test_hosts_of_a_table_are_missing_by_name_and_others_are_refused():
    table = (HostAssignment(0, "a", "10.0.0.2", (1, 2), (0, 1)), HostAssignment(1, "b", "10.0.0.7", (0, 3), (4, 5)))
    found = registry(request(0, 2, 4), total=4, expected=table)
    assert found.describe() == "2 of 4 registered, missing: node 1 (10.0.0.7) ranks 0, 3"
    with pytest.raises(Refused, match="not in the table"):
        found.add("x", request(2, 2, 4))
    found.add("y", request(1, 2, 4))
    assert [(assignment.ranks, assignment.device_ids) for assignment in found.assignments().values()] == [
        ((1, 2), (0, 1)),
        ((0, 3), (4, 5)),
    ]


def test_host_that_went_may_come_again():
    found = registry(request(0), request(1))
    assert found.remove(1) == request(1) and found.remove(1) is None
    found.add("again", request(1, 8))
    assert found.is_complete


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 0}, "speaks protocol 0, this one"),
        ({"worker_num": 1 << 40}, "its request is none: .*worker_num"),
        ({"local_worker_num": 0}, "--local_worker_num 0"),
        ({"name": "a\x1b[2J"}, "its name or address is none"),
        ({"address": "a.example"}, "is no address"),
        ({"table": None}, "its request is none: .*table"),
    ],
)
def test_request_that_is_none_is_refused(changes, reason):
    with pytest.raises(Refused, match=reason):
        HostRequest.from_json({**encode_record(request()), **changes})
    with pytest.raises(Refused):
        HostRequest.from_json([changes])


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.booleans(), st.randoms(use_true_random=False))
def test_ranks_are_dealt_once_each_in_any_order_of_coming(counts, is_numbered, luck):
    total = sum(counts)
    hosts = [
        request(node if is_numbered else -1, count, total, address=str(ipaddress.ip_address(7 + node)))
        for node, count in enumerate(counts)
    ]
    luck.shuffle(hosts)
    found = registry(*hosts, total=total)
    assignments = sorted(found.assignments().values(), key=lambda assignment: assignment.node_rank)
    assert [rank for assignment in assignments for rank in assignment.ranks] == list(range(total))
    assert [len(assignment.ranks) for assignment in assignments] == counts
    assert unpack_hosts(pack_hosts(assignments)) == (*assignments,)


def test_a_job_can_do_with_fewer_hosts_once_their_numbers_have_no_gap():
    registry = Registry(12, 0)
    registry.add("b", request(1))
    assert not registry.can_do_with(1)  # node 0 is missing
    registry.add("a", request(0))
    assert registry.can_do_with(2) and not registry.can_do_with(3) and not registry.is_complete
    assert registry.describe_present() == "node 0 (h, 10.0.0.2) with 4, node 1 (h, 10.0.0.3) with 4"
    registry.close()
    assert registry.is_complete
    assert [assignment.ranks for assignment in registry.assignments().values()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    with pytest.raises(Refused, match="an extra host: the job is complete with 8 workers on 2 hosts"):
        registry.add("c", request(2))
    registry.check_late(request(2, workers=12))
    with pytest.raises(Refused, match="--local_worker_num 13: the job has 12 workers"):
        registry.check_late(request(2, workers=13))


def test_msruns_on_one_machine_share_an_address_when_they_have_numbers_or_it_is_loopback():
    registry = Registry(12, 0)
    for node_rank in range(3):
        registry.add(node_rank, request(node_rank, address="10.0.0.2"))
    assert registry.is_complete
    registry = Registry(12, 0)
    for key in range(3):
        registry.add(key, request(-1, address="127.0.0.1"))
    assert [host.ranks[0] for host in registry.assignments().values()] == [0, 4, 8]

"""The rules of super pods, each shown by the smallest change to a good table that breaks it."""

import pytest
from rank_tables import findings, super_pod_table

from ranktable import RankTableError
from ranktable.rules.super_pods import Sdid, parse_sdid


@pytest.mark.parametrize(
    ("count", "chip", "severities"),
    [
        (8, "a2", set()),
        (9, "a2", {"warning"}),
        (16, "a2", {"warning"}),
        (17, "a2", {"error"}),
        (16, "a3", set()),
        (17, "a3", {"error"}),
    ],
)
def test_a_chip_has_a_usual_and_a_highest_number_of_devices(count, chip, severities):
    table = {**super_pod_table(1, 1, count), "version": "1.0"}
    assert {severity for rule, severity, _ in findings(table, chip=chip) if rule == "R21"} == severities


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        (37748736, Sdid(9, 0, 0, 0)),
        (38600711, Sdid(9, 3, 1, 7)),
        (100663296, Sdid(24, 0, 0, 0)),
        (102563855, Sdid(24, 7, 1, 15)),
        (117440512, Sdid(28, 0, 0, 0)),
        (119341071, Sdid(28, 7, 1, 15)),
        (0, None),
        (7, None),
        (48 << 22, None),
        (9 << 22 | 1, None),
        (2**32 - 1, None),
    ],
)
def test_public_super_device_ids_have_the_layout_and_counts_have_not(number, parts):
    assert parse_sdid(number) == parts


def test_odd_values_in_the_lists_are_reported_and_never_raise():
    for odd in (None, 3, "x", [], {}, [None], [{"server_id": 3}], [{"super_pod_id": [], "server_list": {}}]):
        for version, key in (("1.2", "super_pod_list"), ("1.4", "cluster_list"), ("1.0", "cluster_list")):
            try:
                findings({**super_pod_table(), "version": version, key: odd})
                findings({"version": "1.0", "status": "completed", "server_group_list": odd})
            except RankTableError as error:
                assert "not a" in str(error)

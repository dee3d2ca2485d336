"""What a file is, why, and what to do with it."""

import json
from pathlib import Path

import pytest

from ranktable import read_table
from ranktable.document import parse_document
from ranktable.errors import UnknownDialectError
from ranktable.kinds import detect_dialect, find_near_keys

CATALOGUE = Path(__file__).parent / "catalogue"


def kind_of(path):
    """Return the short name of the dialect of a file, and whether it is read."""
    dialect = detect_dialect(parse_document(path.read_bytes()).value).dialect
    return dialect.name, dialect.schema is not None


def test_show_says_what_is_known_of_a_file_that_is_no_table_of_a_job(run):
    status, out, err = run("show", CATALOGUE / "not_hccl" / "tor_list.json")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].endswith("tor_list.json: a TOR list")
    assert out.splitlines()[1:] == [
        "    dialect:  tor-list",
        "    evidence: tor_ip in its devices and no rank_id",
        "    consumer: ModelArts, beside jobstart_hccl.json",
        "    advice:   it names switches, not ranks: use the file jobstart_hccl.json that stands beside it",
    ]
    status, out, _ = run("show", "--format", "json", CATALOGUE / "not_hccl" / "roles.json")
    assert (status, json.loads(out)["dialect"]) == (0, "roles")


def test_show_names_what_is_no_json(run):
    status, out, err = run("show", CATALOGUE / "not_hccl" / "compressed_payload.json")
    assert (status, out) == (1, "")
    assert "the file is gzip data in base64, not JSON; decode it with base64 -d, then unpack it" in err


def test_show_refuses_what_is_nothing_that_is_known(run):
    status, _, err = run("show", CATALOGUE / "not_hccl" / "near_miss.json")
    assert status == 1
    assert "rename 'serverList' to 'server_list', 'serverCount' to 'server_count'" in err
    assert run("show", CATALOGUE / "concise" / "trailing_comma.json")[0] == 1
    assert run("show", "none.json")[0] == 2


def test_misspelt_keys_are_looked_for_among_the_first_and_short_ones():
    near = find_near_keys(dict.fromkeys([f"x{number}" for number in range(98)] + ["serverlist", "y", "grouplist"]))
    assert near == {"serverlist": "server_list"}
    assert find_near_keys({"s" * 65: 1, "rankList": 1}) == {"rankList": "rank_list"}


def test_no_more_than_six_renames_are_proposed(tmp_path):
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({f"serverlist{number}": 0 for number in range(9)}))
    with pytest.raises(UnknownDialectError) as caught:
        read_table(path)
    assert str(caught.value).count("to 'server_list'") == 6


def test_a_table_whose_rank_id_is_misspelt_is_no_description_of_one_host(tmp_path):
    path = tmp_path / "t.json"
    device = {"device_id": "0", "rankId": "0"}
    path.write_text(json.dumps({"version": "1.2", "server_list": [{"server_id": "a", "device": [device]}]}))
    assert kind_of(path) == ("1.2", True)
    del device["rankId"]
    path.write_text(json.dumps({"version": "1.2", "server_list": [{"server_id": "a", "device": [device]}]}))
    assert kind_of(path) == ("local-comm-res", False)

"""What a file is, why, and what to do with it."""

import base64
import gzip
import json
from pathlib import Path

import pytest

from ranktable import UnknownDialectError, read_table
from ranktable.document import parse_document
from ranktable.faults import name_compression
from ranktable.kinds import detect_dialect, find_near_keys
from ranktable.tables import find_kind

CATALOGUE = Path(__file__).parent / "catalogue"


def kind_of(path):
    """Return the short name of the dialect of a file, None for what is none that is known."""
    data = Path(path).read_bytes()
    kind = find_kind(data, str(path))
    if kind is not None:
        return kind.dialect.name, False
    detection = detect_dialect(parse_document(data).value)
    return (detection.dialect.name, True) if detection else (None, False)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config_map.json", "kind ConfigMap"),
        ("compressed_payload.json", "the first bytes of gzip in base64"),
    ],
)
def test_the_evidence_says_what_gave_the_file_away(name, says):
    assert find_kind((CATALOGUE / "not_hccl" / name).read_bytes(), name).evidence == says


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


def test_show_refuses_what_is_nothing_that_is_known(run):
    status, _, err = run("show", CATALOGUE / "not_hccl" / "near_miss.json")
    assert status == 1
    assert "rename 'serverList' to 'server_list', 'serverCount' to 'server_count'" in err
    assert run("show", CATALOGUE / "concise" / "trailing_comma.json")[0] == 1
    assert run("show", "none.json")[0] == 2


TABLE = b'{"version": "1.0"}'


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (gzip.compress(TABLE, mtime=0), "gzip"),
        (b"\x28\xb5\x2f\xfd\x20\x12", "zstd"),
        (base64.b64encode(gzip.compress(TABLE * 9, mtime=0)), "gzip in base64"),
        (b"\n" + base64.encodebytes(gzip.compress(TABLE * 9, mtime=0)), "gzip in base64"),
        (b"KLUv/SASkQAAAA==", "zstd in base64"),
        (base64.b64encode(TABLE), None),
        (TABLE, None),
        (b"", None),
        (b"H4s", None),
        (b"H4sIAAAA-*", None),
    ],
)
def test_compressed_text_is_recognised_by_its_first_bytes(data, name):
    assert name_compression(data) == name


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

"""`ranktable detect` and `detect_file`: what a file is, why, and what to do with it."""

import base64
import gzip
import json
from pathlib import Path

import pytest

from ranktable import FileKind, JsonTextError, ReadError, detect_file
from ranktable.cli import main
from ranktable.codec.detect import find_near_keys
from ranktable.reading.foreign import name_compression

CATALOGUE = Path(__file__).parent / "catalogue"
KINDS = {
    "concise/good_16pcs.json": ("1.0", True),
    "template2/good_cloud_two_pods.json": ("template2-cloud", True),
    "template2/good_lab_two_hosts.json": ("template2-lab", True),
    "heterogeneous/good_hosts_and_devices.json": ("1.1", True),
    "heterogeneous/good_offline.json": ("1.1-offline", True),
    "v2_0/good_two_racks.json": ("2.0", True),
    "v2_0/draft.json": ("2.0-draft", False),
    "v2_0/optical_switches.json": ("2.0-oxc", False),
    "not_hccl/vllm_prefill_decode.json": ("vllm-pd", False),
    "not_hccl/local_comm_res.json": ("local-comm-res", False),
    "not_hccl/local_endpoints.json": ("local-comm-res", False),
    "not_hccl/tor_list.json": ("tor-list", False),
    "not_hccl/roles.json": ("roles", False),
    "not_hccl/config_map.json": ("configmap", False),
    "not_hccl/config_map_compressed.json": ("configmap", False),
    "not_hccl/compressed_payload.json": ("compressed", False),
    "not_hccl/near_miss.json": (None, False),
    "not_hccl/other_json.json": (None, False),
    "not_hccl/config_map_without_table.json": (None, False),
}


def run(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(("name", "expected"), KINDS.items(), ids=list(KINDS))
def test_a_file_is_named_with_its_evidence_and_what_to_do(name, expected):
    kind = detect_file(CATALOGUE / name)
    assert (kind.dialect, kind.is_supported) == expected
    assert kind.evidence
    assert bool(kind.advice) is not kind.is_supported
    assert kind.exit_code == (1 if kind.dialect is None else 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config_map.json", 'data["hccl.json"], which holds a version 1.0 rank table'),
        ("config_map_compressed.json", 'data["jobstart_hccl.json"], which is compressed (gzip in base64)'),
        ("compressed_payload.json", "the first bytes of gzip in base64"),
        ("near_miss.json", "top-level keys: Version, serverList, serverCount"),
    ],
)
def test_the_evidence_says_what_gave_the_file_away(name, says):
    assert detect_file(CATALOGUE / "not_hccl" / name).evidence == says


def test_near_misses_of_telling_keys_are_named():
    advice = detect_file(CATALOGUE / "not_hccl" / "near_miss.json").advice
    assert advice == "rename 'serverList' to 'server_list', 'serverCount' to 'server_count'"


def test_detect_prints_what_it_knows(capsys, monkeypatch):
    monkeypatch.chdir(CATALOGUE / "not_hccl")
    status, out, err = run(capsys, "detect", "tor_list.json")
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "tor_list.json: a TOR list",
        "    dialect:  tor-list",
        "    evidence: tor_ip in its devices and no rank_id",
        "    read by:  ModelArts, beside jobstart_hccl.json",
        "    here:     known by name only",
        "    advice:   it names switches, not ranks: use the file jobstart_hccl.json that stands beside it",
    ]
    status, out, _ = run(capsys, "detect", "../v2_0/good_two_racks.json")
    assert status == 0
    assert "    here:     read, validated and converted" in out.splitlines()


def test_detect_prints_json_for_every_file(capsys, monkeypatch):
    monkeypatch.chdir(CATALOGUE / "not_hccl")
    status, out, _ = run(capsys, "detect", "--format", "json", "roles.json", "missing.json", "other_json.json")
    first, second, third = json.loads(out)
    assert status == 2
    assert (first["dialect"], first["supported"]) == ("roles", False)
    assert "no such file" in second["error"]
    assert third["dialect"] is None


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["tor_list.json"], 0),
        (["other_json.json"], 1),
        (["tor_list.json", "other_json.json"], 1),
        (["missing.json"], 2),
        (["other_json.json", "missing.json"], 2),
        (["../concise/trailing_comma.json"], 1),
    ],
)
def test_the_exit_status_says_whether_every_file_is_known(capsys, monkeypatch, names, status):
    monkeypatch.chdir(CATALOGUE / "not_hccl")
    assert run(capsys, "detect", *names)[0] == status


def test_what_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(ReadError):
        detect_file(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("server_list: []\n")
    with pytest.raises(JsonTextError):
        detect_file(tmp_path / "text.json")


def test_a_file_may_be_of_no_kind_by_default():
    assert FileKind("x").exit_code == 1


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


@pytest.mark.parametrize("inner", [{"kind": "ConfigMap", "data": {"a": "{}"}}, {"data": 3}, {"data": {"a": 3}}])
def test_a_config_map_inside_a_config_map_is_none_of_ours(tmp_path, inner):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"kind": "ConfigMap", "data": {"x": json.dumps(inner)}}))
    assert detect_file(path).dialect is None


def test_misspelt_keys_are_looked_for_among_the_first_and_short_ones():
    near = find_near_keys(dict.fromkeys([f"x{number}" for number in range(98)] + ["serverlist", "y", "grouplist"]))
    assert near == {"serverlist": "server_list"}
    assert find_near_keys({"s" * 65: 1, "rankList": 1}) == {"rankList": "rank_list"}


def test_no_more_than_six_renames_are_proposed(tmp_path):
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({f"serverlist{number}": 0 for number in range(9)}))
    assert detect_file(path).advice.count("to 'server_list'") == 6


def test_a_table_whose_rank_id_is_misspelt_is_no_description_of_one_host(tmp_path):
    path = tmp_path / "t.json"
    device = {"device_id": "0", "rankId": "0"}
    path.write_text(json.dumps({"version": "1.2", "server_list": [{"server_id": "a", "device": [device]}]}))
    assert detect_file(path).dialect == "1.2"
    del device["rankId"]
    path.write_text(json.dumps({"version": "1.2", "server_list": [{"server_id": "a", "device": [device]}]}))
    assert detect_file(path).dialect == "local-comm-res"

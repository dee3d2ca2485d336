"""The commands that compare tables: diff and digest."""

import io
import json
import sys
from pathlib import Path

import pytest

from ranktable import build_table, encode_table


def write(name, hosts, **options):
    """Write a table and return its text."""
    text = encode_table(build_table(hosts, **options))
    Path(name).write_text(text)
    return text


THREE = [("10.0.0.9", 2), ("10.0.0.10", 2), ("10.0.0.11", 2)]


def test_diff_exits_with_what_it_found(run):
    text = write("a.json", THREE)
    write("b.json", THREE, order="numeric")
    Path("c.json").write_text(json.dumps(json.loads(text), sort_keys=True, indent=7))
    assert run("diff", "a.json", "c.json") == (0, "a.json and c.json say the same\n", "")
    status, out, _ = run("diff", "a.json", "b.json")
    assert status == 1
    assert out.splitlines()[:3] == ["- a.json", "+ b.json", "~ server 10.0.0.10 device 0: rank_id 0 -> 2"]
    assert out.splitlines()[-2:] == ["    and 3 more like this", "6 differences"]
    status, out, _ = run("diff", "--format", "json", "a.json", "b.json")
    found = json.loads(out)
    assert (status, found["same"], len(found["changes"])) == (1, False, 6)
    assert found["changes"][0] == {
        "change": "changed", "item": "device", "name": "10.0.0.10", "part": "0", "copy": 0, "part_copy": 0,
        "field": "rank_id", "before": 0, "after": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["{", "{}", '{"version": "1.0", "server_list": []}', '{"server_list": 1, "status": "initializing"}']
)
def test_diff_exits_with_two_for_what_it_cannot_read(run, text):
    write("a.json", THREE)
    Path("b.json").write_text(text)
    status, out, err = run("diff", "a.json", "b.json")
    assert (status, out) == (2, "")
    assert err.startswith("ranktable: error: b.json")


def test_one_side_of_diff_may_be_standard_input(run, monkeypatch):
    text = write("a.json", THREE)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run("diff", "a.json", "-")[0] == 0
    assert run("diff", "-", "-")[0] == 2


def test_digest_tells_in_what_files_are_equal(run):
    text = write("a.json", THREE)
    Path("same.json").write_text(text)
    Path("spaced.json").write_text(json.dumps(json.loads(text), indent=1))
    turned = json.loads(text)
    turned["server_list"].reverse()
    Path("turned.json").write_text(json.dumps(turned))
    write("other.json", THREE, order="numeric")
    assert run("digest", "a.json", "same.json")[::2] == (0, "")
    status, out, err = run("digest", "a.json", "spaced.json", "turned.json", "other.json")
    assert status == 1
    assert err.splitlines() == [
        "ranktable: spaced.json: other text than, but the same meaning as a.json",
        "ranktable: turned.json: other text than, but the same meaning as a.json",
        "ranktable: other.json: another table than a.json",
    ]
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["a.json", "bytes", "meaning"]
    assert run("digest", "--same", "meaning", "a.json", "turned.json")[0] == 0
    assert run("digest", "--same", "meaning", "a.json", "other.json")[0] == 1


def test_digest_checks_against_one_that_was_written_down(run):
    write("a.json", THREE)
    found = json.loads(run("digest", "--format", "json", "a.json")[1])
    (entry,) = found["files"]
    assert (found["equal"], entry["servers"], entry["devices"]) == (True, 3, 6)
    for kind in ("bytes", "meaning"):
        status, _, err = run("digest", "a.json", "--check", f"SHA256:{entry[f'{kind}_sha256'].upper()}")
        assert (status, err.endswith(f"is the digest of its {kind}\n")) == (0, True)
    status, _, err = run("digest", "a.json", "--check", "0" * 64)
    assert (status, err) == (1, f"ranktable: a.json: none of its digests is {'0' * 64}\n")

"""Whatever stands in a table, `fix` changes how values are written and counts, never an id, an address or a rank."""

import copy
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranktable import RankTableError
from ranktable.edit.fix import fix_table
from ranktable.reading.lenient import parse_leniently

CATALOGUE = sorted((Path(__file__).parent / "catalogue").glob("*/*.json"))
COUNTS = {"server_count", "rank_count", "group_count", "instance_count", "device_count", "device_num", "server_num"}
IDENTITIES = {"server_id", "super_pod_id", "cluster_id", "group_id", "group_name", "pod_name", "node_addr", "node_id"}
HOSTILE = [
    "",
    " ",
    "0",
    "01",
    "00",
    " 1 ",
    "+2",
    "a",
    " a",
    "a ",
    "a,a",
    -1,
    1,
    1.0,
    True,
    None,
    [],
    {},
    [{}],
    "1.0",
    "\uff12",
]


def plain(value):
    """Return what a value says, however it is written."""
    text = ",".join(part.strip() for part in str(value).split(",")) if isinstance(value, str | int | float) else value
    is_number = isinstance(text, str) and not isinstance(value, bool) and re.fullmatch(r"\+?[0-9]{1,10}", text)
    return str(int(text)) if is_number else value if isinstance(value, bool) else text


def read(data):
    try:
        return parse_leniently(data)[0].value
    except RankTableError:
        return None


def check_same(before, after, path=""):
    """Walk both side by side: keys may have another name, but stand in the same order."""
    if isinstance(before, dict) and isinstance(after, dict):
        added = after.keys() - before.keys() & COUNTS if len(after) > len(before) else set()
        kept = [(key, value) for key, value in after.items() if key not in added]
        assert len(kept) == len(before), path
        for (name, old), (key, new) in zip(before.items(), kept, strict=True):
            if key not in COUNTS:
                check_same(old, new, f"{path}.{key} ({name})")
    elif isinstance(before, list) and isinstance(after, list):
        assert len(before) == len(after), path
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            check_same(old, new, f"{path}[{index}]")
        for key in IDENTITIES:
            held = [(o.get(key), n.get(key)) for o, n in zip(before, after, strict=True) if isinstance(n, dict)]
            texts = {pair for pair in held if all(isinstance(text, str) for text in pair)}
            assert len({new for _, new in texts}) == len({old for old, _ in texts}), f"{path}: two of {key} became one"
    else:
        assert plain(before) == plain(after), path


def check_fixed(data):
    before = copy.deepcopy(read(data))
    try:
        fixed = fix_table(data)
    except RankTableError:
        return
    check_same(before, fixed.value)
    again = fix_table(json.dumps(fixed.value).encode())
    assert again.repairs == ()


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_id_of_the_catalogue_changes(path):
    check_fixed(path.read_bytes())


def holders(value):
    """Return every object and array of a JSON value that holds something."""
    found, pending = [], [value]
    while pending:
        holder = pending.pop()
        if isinstance(holder, dict | list) and holder:
            found.append(holder)
            pending += holder.values() if isinstance(holder, dict) else holder
    return found


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(CATALOGUE), st.randoms(use_true_random=False), st.integers(1, 4))
def test_no_id_of_a_hostile_table_changes(path, random, damages):
    value = copy.deepcopy(read(path.read_bytes()))
    for _ in range(damages if value else 0):
        holder = random.choice(holders(value) or [[0]])
        key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
        kind = random.randrange(4)
        if kind == 0:
            holder[key] = copy.deepcopy(random.choice(HOSTILE))
        elif kind == 1 and isinstance(holder[key], str):
            holder[key] = random.choice([f" {holder[key]}", f"{holder[key]} ", f"0{holder[key]}"])
        elif kind == 2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif isinstance(holder, dict):
            holder[random.choice([key.upper(), key.replace("_", "-"), f"{key}s"])] = holder.pop(key)
    if value:
        check_fixed(json.dumps(value).encode())


def test_servers_that_differ_in_blanks_only_stay_two():
    server = {"device": [{"device_id": "0", "rank_id": "0"}]}
    text = json.dumps({"version": "1.0", "status": "completed", "server_list": [
        {"server_id": "a", **server}, {"server_id": "a ", **server}, {"server_id": " b", **server}]})  # fmt: skip
    fixed = fix_table(text.encode())
    assert [entry["server_id"] for entry in fixed.value["server_list"]] == ["a", "a ", "b"]

"""Thousands of damaged tables: each is a table, a report or an error of ours in one line, and what is read is kept.

The damage follows from the number of the case alone, so a failure is repeated by its number. A share of the cases is
part of every run, the rest is marked slow.
"""

import copy
import json
import random
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from asked_cases import slow_but

from ranktable import RankTableError
from ranktable.document import parse_document
from ranktable.fix import fix_table, parse_leniently
from ranktable.kinds import written_names
from ranktable.profile import CHIPS, READERS, Profile, build_profile
from ranktable.report import render_report, render_verdicts_json
from ranktable.tables import decode_table, encode_table
from ranktable.validate import validate_document

SEEDS = [path.read_bytes() for path in sorted((Path(__file__).parent / "catalogue").glob("*/*.json"))]
PROFILES = [
    *(Profile(), Profile("cpu"), Profile("gpu")),
    *(Profile("ascend", chip) for chip in CHIPS),
    *(build_profile(reader=each) for each in READERS),
]
KEYS = [
    *("server_list", "device", "devices", "device_id", "device_ip", "rank_id", "server_id", "status", "version"),
    *("server_count", "host_ip", "pod_ip", "super_pod_list", "super_pod_id", "super_device_id", "group_list"),
    *("instance_list", "pod_name", "node_list", "rank_list", "level_list", "cluster_list", "server_group_list"),
    *("group_id", "device_port", "host_port", "backup_device_ip", "x", "two\nlines", "\x1b[31m", "\ud800", ""),
]
VALUES = [
    *("0", "1", "-1", "01", "00", "+2", "a", "x", "a,a", "10.*.*.*", "::1", "1.2.3.4", "1.2.3.4,1.2.3.5", "65535"),
    *("fe80::1%eth0", "1.0", "1.1", "1.2", "1.3", "1.4", "2.0", "", " ", " 1 ", " a", "a ", "1.2.3.4\n", "\u0663"),
    *("\uff12", "\ud800", "9" * 5000, "a" * 70, "initializing", "completed", None, True, False, 0, 1, -1, 1.5),
    *(10**30, 1e300, [], {}, [[]], [{}], [None], {"a": 1}),
]
BYTES = [*(bytes([each]) for each in b'\0\xff"{}[],:-\n'), b"", b"//", b"...", b"NaN", b"1e999", b"\\u"]
COUNTS = {"server_count", "rank_count", "group_count", "instance_count", "device_count", "device_num", "server_num"}
IDENTITIES = {"server_id", "super_pod_id", "cluster_id", "group_id", "group_name", "pod_name", "node_addr"}
CASES_PER_BLOCK = 250


def damage(case):
    """Return the text of a case: a table of the catalogue with a few members or bytes changed."""
    chance = random.Random(case)
    data = chance.choice(SEEDS)
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict) or chance.random() < 0.3:
        return damage_bytes(data, chance)
    for _ in range(chance.choice([1, 1, 2, 3])):
        damage_value(value, chance)
    text = json.dumps(value, indent=chance.choice([None, 1])).encode()
    return damage_bytes(text, chance) if chance.random() < 0.1 else text


def damage_bytes(data, chance):
    for _ in range(chance.choice([1, 1, 2, 5])):
        start = chance.randint(0, len(data))
        end = start + chance.choice([0, 0, 1, 1, 2, 10, 1000])
        data = data[:start] + chance.choice([*BYTES, data[start:end] * 2]) + data[end:]
    return data


def damage_value(value, chance):
    places = list(places_in(value))
    if not places:
        value[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
        return
    holder, step = chance.choice(places)
    kind = chance.choice(["replace", "remove", "double", "rename", "respell", "blank", "add", "move"])
    if kind == "remove":
        del holder[step]
    elif kind == "double" and isinstance(holder, list):
        holder.insert(step, copy.deepcopy(holder[step]))
    elif kind == "rename" and isinstance(holder, dict):
        holder[chance.choice(KEYS)] = holder.pop(step)
    elif kind == "respell" and isinstance(holder, dict):
        holder[chance.choice([step.upper(), step.replace("_", "-"), f"{step}s"])] = holder.pop(step)
    elif kind == "blank" and isinstance(holder[step], str):
        holder[step] = chance.choice([" {}", "{} ", "0{}"]).format(holder[step])
    elif kind == "add" and isinstance(holder, dict):
        holder[chance.choice(KEYS)] = copy.deepcopy(chance.choice(VALUES))
    elif kind == "move":
        other, other_step = chance.choice(places)
        holder[step] = copy.deepcopy(other[other_step])
    else:
        holder[step] = copy.deepcopy(chance.choice(VALUES))


def places_in(value):
    for step in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, step
        if isinstance(value[step], dict | list):
            yield from places_in(value[step])


def use(data, profile):
    """Read, validate, report, decode and write back; raises RankTableError only."""
    document = parse_document(data, "t.json")
    report = validate_document(document, profile)
    render_report(report)
    render_verdicts_json([(report.source, report)])
    table = decode_table(document)
    if table.dialect not in written_names():
        return
    text = encode_table(table)
    again = decode_table(parse_document(text.encode(), "t.json"))
    assert again == table
    assert encode_table(again) == text


def plain(value):
    """Return what a value says, however it is written."""
    text = ",".join(part.strip() for part in str(value).split(",")) if isinstance(value, str | int | float) else value
    is_number = isinstance(text, str) and not isinstance(value, bool) and re.fullmatch(r"\+?[0-9]{1,10}", text)
    return str(int(text)) if is_number else value if isinstance(value, bool) else text


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
    """`fix` changes how values are written and counts, never an id, an address or a rank, and is done at once."""
    before = copy.deepcopy(parse_leniently(data)[0].value)
    fixed = fix_table(data)
    check_same(before, fixed.value)
    assert fix_table(json.dumps(fixed.value).encode()).repairs == ()


def check_block(block):
    for case in range(block * CASES_PER_BLOCK, (block + 1) * CASES_PER_BLOCK):
        for check in (partial(use, profile=PROFILES[case % len(PROFILES)]), check_fixed):
            try:
                check(damage(case))
            except RankTableError as error:
                assert "\n" not in str(error), f"case {case}: the error has several lines"
            except Exception as error:
                raise AssertionError(f"case {case} raises {error!r}") from error


def test_no_id_of_the_catalogue_changes():
    for data in SEEDS:
        with suppress(RankTableError):
            check_fixed(data)


def test_a_key_stays_beside_one_that_is_spelled_nearly_so():
    check_fixed(b'{"server_count": "0", "server_list": [], "server-list": [], "version": "1.0", "status": "completed"}')


@pytest.mark.parametrize("block", slow_but(("0",), range(40)))
def test_a_damaged_table_is_read_or_refused(block):
    check_block(block)

"""One or a few changes in a good table of each kind, and exactly what validation finds then."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml
from rank_tables import findings

CHANGES = Path(__file__).parent / "changes"
BASES = {path.stem: json.loads(path.read_text()) for path in CHANGES.glob("*.json")}
CASES = [
    (sentence, case)
    for sentence, cases in yaml.safe_load((CHANGES / "cases.yaml").read_text()).items()
    for case in cases
]
STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[(\d+)\]")


def apply(table, path, value):
    *steps, last = [key or int(index) for key, index in STEP.findall(path)]
    for step in steps:
        table = table[step]
    if value == {"gone": True}:
        del table[last]
    elif isinstance(value, dict) and "repeat" in value:
        text, times = value["repeat"]
        table[last] = text * times
    else:
        table[last] = value


@pytest.mark.parametrize(("sentence", "case"), CASES, ids=[f"{sentence}-{n}" for n, (sentence, _) in enumerate(CASES)])
def test_a_changed_table_gets_exactly_the_expected_findings(sentence, case):
    table = copy.deepcopy(BASES[case["base"]])
    for path, value in case.get("set", {}).items():
        apply(table, path, value)
    options = {key: case[key] for key in ("device_target", "chip", "reader") if key in case}
    found = [" ".join(finding).rstrip() for finding in findings(table, **options)]
    assert sorted(found) == sorted(case["found"]), sentence

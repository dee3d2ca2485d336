"""Every table of the catalogue gets exactly the findings that an expert would give."""

from pathlib import Path

import pytest
import yaml

from ranktable import validate_file

CATALOGUE = Path(__file__).parent / "catalogue"
EXPECTED = yaml.safe_load((CATALOGUE / "expected.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_table_gets_the_expected_findings(name):
    expected = EXPECTED[name]
    report = validate_file(CATALOGUE / name, device_target=expected.get("device_target", "ascend"))
    found = [[problem.rule, problem.severity, problem.path] for problem in report.problems]
    assert sorted(found) == sorted(finding[:3] for finding in expected["findings"])
    assert report.is_ready is expected.get("ready", True)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_finding_points_at_its_line(name):
    expected = EXPECTED[name]
    report = validate_file(CATALOGUE / name, device_target=expected.get("device_target", "ascend"))
    lines = {(problem.rule, problem.path): problem.position.line for problem in report.problems}
    for rule, _, path, line in expected["findings"]:
        assert line in (0, lines[rule, path])


def test_every_file_of_the_catalogue_is_expected():
    assert {path.name for path in CATALOGUE.glob("*.json")} == set(EXPECTED)


def test_masked_server_ids_are_named_as_masks():
    report = validate_file(CATALOGUE / "tutorial_16pcs.json")
    messages = [problem.message for problem in report.problems]
    assert sum("a mask" in message for message in messages) == 2
    assert sum("same server_id stands at server_list[0].server_id" in message for message in messages) == 1

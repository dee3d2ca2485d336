"""Findings as SARIF 2.1.0: what the standard demands, and that nothing of a report is lost."""

import json
from pathlib import Path

import jsonschema
import pytest

from ranktable.cli import main
from ranktable.report.findings import Unjudged, build_sarif
from ranktable.validate import validate_file

HERE = Path(__file__).parent
TABLES = sorted((HERE / "catalogue" / "concise").glob("*.json"))
ESSENTIALS = jsonschema.Draft7Validator(json.loads((HERE / "sarif_essentials.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def verdicts():
    return [*map(validate_file, TABLES), Unjudged("no\nsuch ü.json", "cannot read it", "")]


def test_a_log_has_the_form_that_the_standard_demands(verdicts):
    ESSENTIALS.validate(build_sarif(verdicts, 2))


def test_every_problem_is_a_result_at_its_place(verdicts):
    (run,) = build_sarif(verdicts, 2)["runs"]
    found = [
        (
            run["artifacts"][place["artifactLocation"]["index"]]["location"]["uri"],
            run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"],
            result["level"],
            place["region"]["startLine"],
            place["region"]["startColumn"],
            [step["fullyQualifiedName"] for step in result["locations"][0].get("logicalLocations", [])],
        )
        for result in run["results"]
        for place in [result["locations"][0]["physicalLocation"]]
    ]
    assert found == [
        (
            f"file://{report.source}",
            problem.rule,
            problem.severity,
            problem.position.line,
            problem.position.column,
            [problem.path] if problem.path else [],
        )
        for report in verdicts[:-1]
        for problem in report.problems
    ]
    assert all(result["ruleId"] for result in run["results"])


def test_a_file_that_cannot_be_judged_is_a_notification(verdicts):
    (run,) = build_sarif(verdicts, 2)["runs"]
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 2)
    (notification,) = invocation["toolExecutionNotifications"]
    place = notification["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert (place, notification["message"]["text"]) == ("no%0Asuch%20%C3%BC.json", "cannot read it")


def test_every_rule_has_an_id_of_its_own_and_a_help_text(verdicts):
    rules = build_sarif(verdicts, 2)["runs"][0]["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    assert {"R1", "R9", "R16", "R31", "R32"} <= {rule["id"] for rule in rules}
    assert [rule["id"] for rule in rules][:4] == ["R1", "R2", "R3", "R4"]
    assert all(len(rule["help"]["text"]) > len(rule["shortDescription"]["text"]) > 10 for rule in rules)


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (["good_16pcs.json"], 0),
        (["numeric_order.json"], 0),
        (["--strict", "numeric_order.json"], 1),
        (["tutorial_8pcs.json", "tutorial_8pcs.json"], 1),
        (["initializing.json"], 3),
        (["trailing_comma.json", "missing.json"], 2),
        (["missing.json"], 2),
    ],
)
def test_the_command_prints_a_log_and_keeps_its_exit_status(capsys, monkeypatch, names, status):
    monkeypatch.chdir(TABLES[0].parent)
    assert main(["validate", "--format", "sarif", *names]) == status
    captured = capsys.readouterr()
    log = json.loads(captured.out)
    ESSENTIALS.validate(log)
    assert captured.err == ""
    assert log["runs"][0]["invocations"][0]["exitCode"] == status
    assert {artifact["location"]["uri"] for artifact in log["runs"][0]["artifacts"]} == set(names) - {"--strict"}

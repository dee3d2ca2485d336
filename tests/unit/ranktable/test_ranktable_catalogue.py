"""Every table of the catalogue gets exactly the findings that an expert would give.

A folder of the catalogue holds tables and one `expected.yaml`: per table why it is there, how it is checked
(`device_target`, `chip`, `profile`, `network_plan`, and `mode`, the permissions that the file has), its findings as
[rule, severity, path, line], and `ready: false`.
A table that is not judged at all has `error` in place of findings: the name of the exception.
"""

import shutil
import tempfile
from pathlib import Path

import pytest
import yaml

from ranktable import errors, validate_file
from ranktable.validate import Report

CATALOGUE = Path(__file__).parent / "catalogue"
OPTIONS = ("device_target", "chip", "profile", "network_plan")
EXPECTED = {
    f"{listing.parent.name}/{name}": expected
    for listing in sorted(CATALOGUE.glob("*/expected.yaml"))
    for name, expected in yaml.safe_load(listing.read_text(encoding="utf-8")).items()
}
JUDGED = [name for name in EXPECTED if "error" not in EXPECTED[name]]


def validate(name: str) -> Report:
    options = {option: EXPECTED[name][option] for option in OPTIONS if option in EXPECTED[name]}
    if "mode" not in EXPECTED[name]:
        return validate_file(CATALOGUE / name, **options)
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(shutil.copy(CATALOGUE / name, folder))
        copied.chmod(int(EXPECTED[name]["mode"], 8))
        return validate_file(copied, **options)


@pytest.mark.parametrize("name", JUDGED)
def test_a_table_gets_the_expected_findings_at_their_lines(name):
    report = validate(name)
    found = [[problem.rule, problem.severity, problem.path, problem.position.line] for problem in report.problems]
    assert sorted(found) == sorted(EXPECTED[name]["findings"])
    assert report.is_ready is EXPECTED[name].get("ready", True)


@pytest.mark.parametrize("name", sorted(set(EXPECTED) - set(JUDGED)))
def test_a_table_that_is_not_judged_raises_the_expected_error(name):
    with pytest.raises(getattr(errors, EXPECTED[name]["error"])):
        validate(name)


def test_every_file_of_the_catalogue_is_expected():
    files = {f"{path.parent.name}/{path.name}" for path in CATALOGUE.glob("*/*") if path.name != "expected.yaml"}
    assert files == set(EXPECTED)


def test_masked_server_ids_are_named_as_masks():
    messages = [problem.message for problem in validate("concise/tutorial_16pcs.json").problems]
    assert sum("a mask" in message for message in messages) == 2
    assert sum("same server_id stands at server_list[0].server_id" in message for message in messages) == 1

"""A skip of a wing that REQUIRE names is a failure, of any other a skip as before."""

import re

import pytest
from job_runner import REPOSITORY
from required_wings import WINGS, fail_if_required, required


@pytest.mark.parametrize(
    ("reason", "require", "outcome"),
    [
        ("cannot make hosts: no ip", "hosts,zoo", "failed"),
        ("cannot make hosts: no ip", "mpirun", "skipped"),
        ("timm not installed: pip install -e '.[test,zoo]'", "zoo", "failed"),
        ("no IPv6 here", "hosts, mpirun,zoo", "skipped"),
        ("no mpirun", "", "skipped"),
    ],
)
def test_skips_of_required_wings_fail(monkeypatch, reason, require, outcome):
    report = pytest.CollectReport("test_x.py", "skipped", ("test_x.py", 1, reason), None)
    with monkeypatch.context() as patch:
        patch.setenv("REQUIRE", require)
        fail_if_required(report, required())
    assert report.outcome == outcome


def test_unknown_wing_is_refused(monkeypatch):
    with (
        monkeypatch.context() as patch,
        pytest.raises(pytest.UsageError, match="no such wing: zoology; there are hosts"),
    ):
        patch.setenv("REQUIRE", "zoology")
        required()


@pytest.mark.parametrize("wing", WINGS)
def test_wing_has_tests_that_may_be_skipped_with_its_words(wing):
    texts = [path.read_text() for path in (REPOSITORY / "tests").rglob("*.py") if path.stem != "test_required_wings"]
    skips = [line for text in texts for line in text.splitlines() if "skip" in line or "installed" in line]
    assert any(re.search(WINGS[wing], line) for line in skips)

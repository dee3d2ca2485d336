"""The page of lint rules has a section for each rule, with its severity and meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch_templates.lint import RULES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "lint_rules.md"
START = "<!-- rules: made by pytest --update-golden -->\n"


def test_sections_are_those_of_the_rules(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, found, _ = text.partition(START)
    assert found
    sections = "".join(f"\n### {rule.rule_id}\n\n{rule.severity.capitalize()}. {rule.meaning}\n" for rule in RULES)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + START + sections, encoding="utf-8")
        text = PAGE.read_text(encoding="utf-8")
    assert text == before + START + sections, "run pytest --update-golden"

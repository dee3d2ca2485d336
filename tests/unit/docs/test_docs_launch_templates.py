"""The pages of a job's settings and of lint rules say what the sources say."""

from pathlib import Path

from launch_templates import list_kinds
from launch_templates.kinds import takers
from launch_templates.lint import RULES
from launch_templates.spec import settings_of_spec

REFERENCE = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGE = REFERENCE / "job_spec.md"
LINT_PAGE = REFERENCE / "lint_rules.md"
START = "<!-- rules: made by pytest --update-golden -->\n"


def row(setting):
    """The line of the table for one setting."""
    default = (
        "required" if setting.is_required else f"`{setting.default}`" if setting.default not in ({}, [], None) else ""
    )
    found = list(takers(setting.name))
    missing = [kind for kind in list_kinds() if kind not in found]
    pods = list(takers("labels"))
    others = [kind for kind in found if kind not in pods]
    without = [kind for kind in pods if kind not in found]
    if not missing:
        kinds = "all"
    elif len(missing) < 6:
        kinds = f"all but {', '.join(missing)}"
    elif len(without) < 4:
        kinds = ", ".join(["Kubernetes" + (f" (not {', '.join(without)})" if without else ""), *others])
    else:
        kinds = ", ".join(found)
    constraint = setting.value_type.constraint
    first = next(other for other in settings_of_spec().values() if other.value_type.constraint == constraint)
    if len(constraint.split()) > 5 and first.name != setting.name:
        constraint = f"as `{first.name}`"
    words = (f"`{setting.name}`", setting.value_type.type_name, default, kinds, f"{setting.meaning}; {constraint}")
    return f"| {' | '.join(word.replace('|', '/') for word in words)} |"


def table():
    yield "| setting | type | default | kinds | meaning; constraint |"
    yield "| --- | --- | --- | --- | --- |"
    yield from map(row, settings_of_spec().values())


def test_table_of_settings_is_that_of_the_dataclass(request):
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition("| setting | type |")
    after = rest.partition("\n\n")[2]
    made = before + "\n".join(table()) + "\n\n" + after
    if request.config.getoption("--update-golden"):
        PAGE.write_text(made, encoding="utf-8")
        text = made
    assert text == made, "run pytest --update-golden"


def test_sections_are_those_of_the_rules(request):
    text = LINT_PAGE.read_text(encoding="utf-8")
    before, found, _ = text.partition(START)
    assert found
    sections = "".join(f"\n### {rule.rule_id}\n\n{rule.severity.capitalize()}. {rule.meaning}\n" for rule in RULES)
    if request.config.getoption("--update-golden"):
        LINT_PAGE.write_text(before + START + sections, encoding="utf-8")
        text = LINT_PAGE.read_text(encoding="utf-8")
    assert text == before + START + sections, "run pytest --update-golden"

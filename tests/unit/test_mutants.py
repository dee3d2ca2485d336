"""make mutants: which faults are put into a module, and which tests are then run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants.mutations import block_of, changes, draw, find_mutations
from mutants.survey import LEFT_OUT, REPOSITORY, Survey, list_test_files


def faults(source: str) -> set[str]:
    """Return the module with each of its faults."""
    return {mutation.apply(source) for mutation in find_mutations("m.py", source) if changes(mutation, source)}


def inside(*lines: str, head: str = "def f(a, b):") -> str:
    return "\n".join([head, *(f"    {line}" for line in lines), ""])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return a < b", {"return a <= b", "return a >= b", "return None"}),
        ("return a == b", {"return a != b", "return None"}),
        ("return a is not b", {"return a is b", "return None"}),
        ("return a not in b", {"return a in b", "return None"}),
        ("x = now < deadline", {"x = now >= deadline"}),
        ("x = limit_s >= 0", {"x = limit_s > 0", "x = limit_s < 0", "x = limit_s >= 1"}),
        ("return not a", {"return bool(a)", "return None"}),
        ("return a and b", {"return ((a) or (b))", "return None"}),
        ("x = a if b else 7", {"x = a if not (b) else 7", "x = a if b else 8"}),
        ("x = [c for c in a if c]", {"x = [c for c in a if not (c)]"}),
        ("x = True", {"x = False"}),
        ("a.send(b)", {"pass"}),
        ("a.x = b", {"pass"}),
        ("a[b] += 1", {"pass", "a[b] += 2"}),
        ("del a[b]", {"pass"}),
        ("raise KeyError(a)", {"pass"}),
    ],
)
def test_faults_of_a_line(line: str, expected: set[str]) -> None:
    assert faults(inside(line)) == {inside(text) for text in expected}


@pytest.mark.parametrize(
    "source",
    [
        '"""Text."""\n',
        "__all__ = ['f']\nLIMIT_S = 5.0\nMAX_NOTES = 100\nLOGINS_AT_A_TIME = 8\n",
        inside("x = secrets.token_hex(32)"),
        inside('"""Text."""', 'print(f"{a + 1} of {2}")', "assert a < b", "x: int"),
        inside("x = a.recv(4096)", "time.sleep(0.5)"),
        inside("x = now + 2 * SALVAGE_S", "y = a.SALVAGE_S / 2", "z = round(a, 3)"),
        inside("self._x = a", head="def __init__(self, a):"),
        "if TYPE_CHECKING:\n    import x\n    x.y(1)\n",
        "@cache(maxsize=1)\nclass A:\n    x: tuple[1]\n",
    ],
)
def test_what_no_behaviour_depends_on_is_left_alone(source: str) -> None:
    assert faults(source) == set()


def test_return_of_a_condition_is_turned_round() -> None:
    head = "def f(a, b) -> bool:"
    assert faults(inside("return a.b()", head=head)) == {inside("return not (a.b())", head=head)}


def test_all_other_characters_stay_and_the_difference_is_shown() -> None:
    source = inside("x = 'ä'  # not touched", "if (a and", "        b):", "    a.b()  # ü")
    (swapped,) = [mutation for mutation in find_mutations("m.py", source) if mutation.kind == "and/or swapped"]
    assert swapped.apply(source) == source.replace("a and\n            b", "((a) or (b))")
    assert swapped.describe(source).splitlines() == [
        "  -     if (a and",
        "  -             b):",
        "  +     if (((a) or (b))):",
    ]


def test_seed_draws_the_same_lines_again_and_every_line_once() -> None:
    sources = {"m.py": inside(*(f"a.b({number})" for number in range(2, 40)))}
    first, again, other = draw(sources, 10, 1), draw(sources, 10, 1), draw(sources, 10, 2)
    assert first == again != other
    assert len({mutation.line for mutation in first}) == 10
    assert len(draw(sources, 1000, 1)) == 38


BLOCKS = """\
def f(a):
    if a:
        x = 1
    elif a is None:
        x = 2
    for b in a:
        def g():
            return 4
    return [lambda: 6]
y = 7
"""


@pytest.mark.parametrize(("line", "block"), [(3, "f#1"), (5, "f#3"), (8, "f.g#0"), (9, "f#0"), (10, "")])
def test_place_belongs_to_its_innermost_block(line: int, block: str) -> None:
    assert block_of(ast.parse(BLOCKS), line, 12) == block


QUICK, SLOW = "tests/unit/test_a.py::test_quick", "tests/unit/test_a.py::test_slow"
OTHER, JOB = "tests/unit/test_b.py::test_other", "tests/e2e/test_c.py::test_{}"


def survey() -> Survey:
    seconds = {QUICK: 1.0, SLOW: 5.0, OTHER: 2.0, JOB.format(1): 60.0, JOB.format(2): 0.0}
    blocks = {
        "f#0": {QUICK, SLOW, OTHER},
        "f#1": {OTHER, "tests/unit/test_a.py::test_failed"},
        "g#0": {"tests/e2e/test_c.py"},
    }
    return Survey("1", seconds, {"m.py": blocks})


def test_tests_of_a_block_come_by_turns_quick_ones_first() -> None:
    found = survey()
    assert found.tests_of("m.py", "f#0") == [QUICK, OTHER, SLOW]
    assert found.tests_of("m.py", "f#1") == [OTHER], "one that fails anyway notices nothing"
    assert found.tests_of("m.py", "g#0") == [JOB.format(2), JOB.format(1)], "a job for the whole file"


def test_block_that_is_new_is_taken_for_its_function_and_a_new_function_for_its_module() -> None:
    found = survey()
    assert set(found.tests_of("m.py", "f#9")) == {QUICK, SLOW, OTHER}
    assert len(found.tests_of("m.py", "h#0")) == 5
    assert found.tests_of("other.py", "") == []


def test_tests_are_run_until_their_time_is_up() -> None:
    found = survey()
    assert found.within([QUICK, OTHER, SLOW], 3.5) == [QUICK, OTHER]
    assert found.within([SLOW], 1.0) == [SLOW], "one at least"
    assert found.within([QUICK, JOB.format(2), JOB.format(1)], 59.0) == [QUICK], "whoever comes first waits for the job"
    assert len(found.within([QUICK, JOB.format(2), JOB.format(1)], 61.0)) == 3
    assert found.cost_s([JOB.format(1), JOB.format(2), SLOW]) == 65.0


def test_survey_is_kept(tmp_path: Path) -> None:
    survey().write(tmp_path / "kept" / "survey.pickle")
    assert Survey.read(tmp_path / "kept" / "survey.pickle") == survey()


def test_names_of_what_is_left_out_are_those_of_tests() -> None:
    found = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").rglob("*.py")]
    assert [prefix for prefix in LEFT_OUT if not any(name.startswith(prefix) for name in found)] == []
    assert len(list_test_files(REPOSITORY)) > 150

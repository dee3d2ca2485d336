"""make mutants: which faults are put into a module, and which tests are then run."""

import sys
from types import SimpleNamespace

import pytest
from mutants.__main__ import REPOSITORY, ROOMS, order_tests
from mutants.mutations import changes, draw, find_mutations, mark

import msrun


def faults(source):
    """Return the module with each of its faults."""
    return {mutation.apply(source) for mutation in find_mutations("m.py", source) if changes(mutation, source)}


def inside(*lines, head="def f(a, b):"):
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
def test_faults_of_a_line(line, expected):
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
def test_what_no_behaviour_depends_on_is_left_alone(source):
    assert faults(source) == set()


def test_return_of_a_condition_is_turned_round():
    head = "def f(a, b) -> bool:"
    assert faults(inside("return a.b()", head=head)) == {inside("return not (a.b())", head=head)}


def test_all_other_characters_stay_and_the_difference_is_shown():
    source = inside("x = 'ä'  # not touched", "if (a and", "        b):", "    a.b()  # ü")
    (swapped,) = [mutation for mutation in find_mutations("m.py", source) if mutation.kind == "and/or swapped"]
    assert swapped.apply(source) == source.replace("a and\n            b", "((a) or (b))")
    assert swapped.describe(source).splitlines() == [
        "  -     if (a and",
        "  -             b):",
        "  +     if (((a) or (b))):",
    ]


def test_seed_draws_the_same_lines_again_and_every_line_once():
    sources = {"m.py": inside(*(f"a.b({number})" for number in range(2, 40)))}
    first, again, other = draw(sources, 10, 1), draw(sources, 10, 1), draw(sources, 10, 2)
    assert first == again != other
    assert len({mutation.line for mutation in first}) == 10
    assert len(draw(sources, 1000, 1)) == 38


def test_a_mark_notes_the_statements_that_run_and_changes_nothing(monkeypatch):
    lines = ["while a < b:", "    a += 2", "    if a == 7:", "        c = (a +", "             1)", "    elif a > 8:"]
    source = "D = 1\n" + inside(
        "'Text.'",
        "c = D - 1",
        *lines,
        "        @staticmethod",
        "        def c(d=a - 1):",
        "            return d",
        "return c",
    )
    begins = {number: mutation.begin for number, mutation in enumerate(find_mutations("m.py", source))}
    reached = set()
    module = SimpleNamespace(reach=lambda number: reached.add(source[: begins[number]].count("\n")))
    monkeypatch.setattr(msrun, "reached", module, raising=False)
    monkeypatch.setitem(sys.modules, "msrun.reached", module)
    names = {}
    exec(mark(source, begins), names)
    reached.clear()  # also what runs at import is reached by those who call a function
    assert (names["f"](1, 6), reached) == (8, {0, 3, 4, 5, 6, 8, 9, 13})
    assert (names["f"](8, 9)(), reached) == (9, {0, 3, 4, 5, 6, 8, 9, 11, 12, 13})


@pytest.mark.parametrize("reached_at_import", [False, True])
def test_a_fault_is_judged_by_its_modules_tests_then_units_then_jobs(reached_at_import):
    file, unit = "tests/unit/agent/test_agent_supervisor.py", "tests/unit/test_mutants.py::b"
    own, job = f"{file}::a", "tests/e2e/test_on_ranks.py::c"
    with_shared = "tests/e2e/test_script_habits.py"
    (mutation, *_) = find_mutations("msrun/agent/supervisor.py", inside("return a < b"))
    asked = {own, unit, job} | ({""} if reached_at_import else set())
    found = order_tests(mutation, {*asked, f"{with_shared}::d"})
    assert with_shared in found
    if reached_at_import:
        assert {*found} - asked >= {file}
    assert [test for test in found if test in asked] == [own, unit, job]


def test_rooms_are_there():
    assert [room for room in ROOMS if not (REPOSITORY / room).is_dir()] == []

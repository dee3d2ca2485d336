"""make mutants: which faults are put into a module, and which tests are then run."""

from pathlib import Path

import pytest
from mutants.__main__ import REPOSITORY, ROOMS, Outcome, Record, batches
from mutants.mutations import changes, draw, find_mutations


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


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("msrun/agent/supervisor.py", ["agent_supervisor", "agent_warm", "launch_hang", "launch_environment"]),
        ("msrun/launch/simulation.py", ["planning_spec", "launch_output", "launch_logs", "launch_environment"]),
        ("ranktable/rules/network.py", ["ranktable_rules", "ranktable_convert"]),
        ("msrun/runtime/schedule/replay.py", [f"runtime_{name}" for name in ("schedule", "capture", "laws", "shm")]),
    ],
)
def test_tests_of_a_fault_are_those_of_its_module_its_room_and_its_jobs(module, expected):
    found = [{Path(path).stem.removeprefix("test_") for path in batch} for batch in batches(module)]
    assert [name in batch for name, batch in zip(expected, found, strict=True)] == [True] * len(expected)


def test_rooms_and_their_jobs_are_there():
    wanted = [*ROOMS, *(f"tests/e2e/test_{name}.py" for names in ROOMS.values() for name in names)]
    assert [name for name in wanted if not (REPOSITORY / name).exists()] == []


def test_the_test_that_noticed_a_fault_is_found_again_with_the_record(tmp_path):
    mutation, other = find_mutations("m.py", inside("return a < b"))[:2]
    Record(tmp_path / "record").add(Outcome(mutation, "tests/unit/test_m.py::test_f[a b]"))
    again = Record(tmp_path / "record")
    assert (again.find(mutation), again.find(other)) == ("tests/unit/test_m.py::test_f[a b]", "")
    assert Record(tmp_path / "none").find(mutation) == ""

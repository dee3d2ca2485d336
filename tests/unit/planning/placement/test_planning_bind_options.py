"""The words of --bind_core."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from msrun.errors import UsageError
from msrun.planning.placement.bind_options import CoreBinding, parse_bind_core


@pytest.mark.parametrize("word", ["True", "true", "1", "yes", " on "])
def test_true_asks_for_shares(word: str) -> None:
    assert parse_bind_core(word) == CoreBinding(is_auto=True)


@pytest.mark.parametrize("word", ["False", "false", "0", "no", "OFF"])
def test_false_asks_for_nothing(word: str) -> None:
    assert parse_bind_core(word) is None


def test_dict_of_mindspore_is_read() -> None:
    text = '{"device0": ["0-2", "5"], "device10": [], "scheduler": ["7"]}'
    assert parse_bind_core(text) == CoreBinding(is_auto=False, devices={0: (0, 1, 2, 5), 10: ()}, scheduler=(7,))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("nope", r"--bind_core nope: neither True, False nor a JSON object; give e\.g\. --bind_core='\{"),
        ("", r"neither True, False nor a JSON object"),
        ("{'device0': ['0']}", r"neither True, False nor a JSON object"),
        ('{"device0": ["0"]', r"neither True, False nor a JSON object"),
        ("{}", r"not a JSON object of devices"),
        ("[]", r"not a JSON object of devices"),
        ("2", r"not a JSON object of devices"),
        ('{"device0": ["0"], "device0": ["1"]}', r"'device0' is there 2 times"),
        ('{"gpu0": ["0"]}', r"'gpu0' is no device; keys are device0, device1, \.\.\. and scheduler"),
        ('{"device": ["0"]}', r"'device' is no device"),
        ('{"device01": ["0"]}', r"'device01' is no device"),
        ('{"device-1": ["0"]}', r"'device-1' is no device"),
        ('{"device0": "0-3"}', r"'device0' has \"0-3\", which is no list; give a list of strings"),
        ('{"device0": {"a": 1}}', r"which is no list"),
        ('{"device0": [0]}', r"'device0' has 0, which is no string"),
        ('{"device0": [null]}', r"has null, which is no string"),
        ('{"device0": ["0", "3-1"]}', r"'device0': '3-1' runs backwards"),
        ('{"device0": ["a-b"]}', r"'device0': 'a-b' is no CPU number or range"),
        ('{"device0": ["0-3,8"]}', r"'0-3,8' is no CPU number or range"),
        ('{"device0": [""]}', r"'' is no CPU number or range"),
        ('{"scheduler": ["-1"]}', r"'scheduler': '-1' is no CPU number or range"),
    ],
)
def test_wrong_words_are_refused_in_one_line(text: str, pattern: str) -> None:
    with pytest.raises(UsageError, match=pattern) as error:
        parse_bind_core(text)
    assert "\n" not in str(error.value)


@given(st.dictionaries(st.integers(0, 99), st.sets(st.integers(0, 200)), min_size=1))
def test_any_dict_survives_being_written_and_read(devices: dict[int, set[int]]) -> None:
    text = json.dumps({f"device{number}": [str(cpu) for cpu in cpus] for number, cpus in devices.items()})
    binding = parse_bind_core(text)
    assert binding is not None
    assert binding.devices == {number: tuple(sorted(cpus)) for number, cpus in devices.items()}

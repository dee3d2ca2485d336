"""The small pure parts: names, quantities, references, YAML writing."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch_templates import names
from launch_templates.names import escape_references, find_reference
from launch_templates.render import dump_documents
from launch_templates.settings import merge_settings, parse_settings
from launch_templates.values import find_quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", "8"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        (".5", "0.5"),
        ("2Ki", "2048"),
        ("3M", "3000000"),
        ("1e3", "1000"),
        ("1E", str(10**18)),
    ],
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "8GB", "8 Gi", "-1", "Gi", "1..2", "0x1", "\u0663", "1\n"])
def test_other_texts_are_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("value", "number"), [(8, 8), (0.5, Decimal("0.5")), ("1k", 1000), (True, None), (None, None), ([], None)]
)
def test_amounts_of_a_manifest_may_be_numbers(value: Any, number: Any) -> None:
    assert find_quantity(value) == number


@pytest.mark.parametrize(
    ("text", "label", "service"),
    [
        ("a", True, True),
        ("0a", True, False),
        ("a-1", True, True),
        ("-a", False, False),
        ("a-", False, False),
        ("A", False, False),
        ("a.b", False, False),
        ("a" * 63, True, True),
        ("a" * 64, False, False),
        ("a\n", False, False),
        ("", False, False),
    ],
)
def test_labels_follow_the_dns_rules(text: str, label: bool, service: bool) -> None:
    assert (names.fits(names.LABEL, text), names.fits(names.SERVICE, text)) == (label, service)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train", True),
        ("train:1.0", True),
        ("localhost:5000/team/train:1", True),
        ("r.example/t@sha256:" + "0" * 64, True),
        ("r.example/t@sha256:00", False),
        ("Train", True),
        ("r.example/Train", False),
        ("a b", False),
        ("", False),
        ("https://r.example/t", False),
    ],
)
def test_image_references_are_recognised(text: str, expected: bool) -> None:
    assert names.fits(names.IMAGE, text) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("HF_TOKEN", True),
        ("db_password", True),
        ("WANDB_API_KEY", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("EOS_TOKEN", False),
        ("KEYS", False),
    ],
)
def test_variables_that_hold_secrets_are_recognised_by_name(name: str, expected: bool) -> None:
    assert names.is_secret_variable(name) is expected


@pytest.mark.parametrize(
    ("text", "name"), [("$(A)", "A"), ("${A}", "A"), ("$A", "A"), ("$(A)b", None), ("A", None), ("", None), ("$", None)]
)
def test_references_to_variables_are_recognised(text: str, name: str | None) -> None:
    assert find_reference(text) == name


@given(st.text("$()A", max_size=10))
def test_only_text_that_the_kubelet_would_change_is_escaped(text: str) -> None:
    assert (escape_references(text) == text) == ("$(" not in text and "$$" not in text)


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(blacklist_categories=("Cs",)), max_size=20),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text("abc$: \n", max_size=5), below, max_size=3),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(st.text("abc", min_size=1), trees, min_size=1, max_size=3), min_size=1, max_size=3))
def test_written_yaml_reads_back_as_it_was(documents: list[Any]) -> None:
    assert list(yaml.safe_load_all(dump_documents(documents))) == documents


def test_settings_keep_everything_after_the_first_equals_sign() -> None:
    assert parse_settings(["env.A=b=c", "log-dir=/a/b", "env.B.C=", "nodes=1", "nodes=2"]) == {
        "env": {"A": "b=c", "B.C": ""},
        "log_dir": "/a/b",
        "nodes": "2",
    }


def test_tables_are_merged_and_other_values_replaced() -> None:
    merged = merge_settings({"env": {"A": "1", "B": "1"}, "nodes": 2}, {"env": {"B": "2"}, "nodes": 3})
    assert merged == {"env": {"A": "1", "B": "2"}, "nodes": 3}

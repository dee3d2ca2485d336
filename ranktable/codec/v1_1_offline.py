"""Dialect 1.1-offline: `node_list[].rank_list[]` with node_id and item_id, for compiling a model without devices.

Source of the rules: HCCL's parser of tables for offline compilation.
"""

from __future__ import annotations

from collections.abc import Mapping

from ranktable.codec.codec import Codec
from ranktable.codec.node_list import NodeForm, check_form, decode_form, encode_form, survey_form
from ranktable.codec.shape import Key
from ranktable.model import RankTable
from ranktable.problem import Problem
from ranktable.survey import Survey

_FORM = NodeForm(
    "1.1-offline",
    table=(
        Key("version"),
        Key("status", missing="error"),
        Key("collective_id"),
        Key("mode"),
        Key("node_list", "list", missing="error"),
    ),
    node=(Key("node_id", missing="error"), Key("rank_list", "list", missing="error")),
    device_key="item_id",
    rank=(
        Key("rank_id", "number", missing="error", rule="R9"),
        Key("item_id", missing="error"),
        Key("rank_ip"),
    ),
    number_keys=("item_id",),
)


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure; empty when it can be decoded."""
    return check_form(value, _FORM)


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object, however faulty it is."""
    return survey_form(value, _FORM)


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    return decode_form(value, _FORM, empty_rank_ip=False)


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`; decoding it gives `table` again. Raises BuildError."""
    return encode_form(table, _FORM, empty_rank_ip=False)


CODEC = Codec(check_structure, survey, decode, encode)

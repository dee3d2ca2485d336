"""Dialect 1.1: `node_list[].ranks[]`, groups of devices and hosts, read by HCCL for heterogeneous training.

A missing device_id means a rank on the host and is written as "-1", which says the same. `sdid` is the model's
`super_device_id`. Source of the rules: HCCL's parser of heterogeneous tables.
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
    "1.1",
    table=(
        Key("version"),
        Key("status", missing="error"),
        Key("collective_id", missing="error"),
        Key("mode"),
        Key("heterog_sub_version"),
        Key("node_list", "list", missing="error"),
    ),
    node=(Key("node_addr", missing="error"), Key("ranks", "list", missing="error")),
    device_key="device_id",
    rank=(
        Key("rank_id", "number", missing="error", rule="R9"),
        Key("device_id"),
        Key("rank_ip"),
        Key("port", "number", rule="R33"),
        Key("sdid", "number", rule="R33"),
        Key("bind_device_id"),
    ),
    number_keys=("device_id", "bind_device_id"),
)


def check_structure(value: Mapping[str, object]) -> list[Problem]:
    """Return every fault of the structure; empty when it can be decoded."""
    return check_form(value, _FORM)


def survey(value: Mapping[str, object]) -> Survey:
    """Return what can be read of the object, however faulty it is."""
    return survey_form(value, _FORM)


def decode(value: Mapping[str, object]) -> RankTable:
    """Return the table. `value` must have passed `check_structure` without an error."""
    return decode_form(value, _FORM, empty_rank_ip="heterog_sub_version" in value)


def encode(table: RankTable) -> dict[str, object]:
    """Return the JSON object of `table`; decoding it gives `table` again. Raises BuildError.

    With heterog_sub_version every rank needs the key rank_ip, which is empty where there is no address.
    """
    return encode_form(table, _FORM, empty_rank_ip="heterog_sub_version" in table.extra)


CODEC = Codec(check_structure, survey, decode, encode)

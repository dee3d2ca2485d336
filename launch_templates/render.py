"""A spec for a kind -> a manifest or a script, with patches merged in, as YAML that every parser reads alike. Pure.

What `render_manifest` returns passes this package's own lint without an error; tests hold that.

A patch is merged as `kubectl patch` and kustomize merge it (strategic merge): mappings are merged and `null` removes a
key. Items of a list are merged by name (of volumeMounts by mountPath), an item with `$patch: delete` is removed; other
lists are replaced.

YAML 1.1 and 1.2 and the parsers of kubectl disagree on plain scalars such as `y`, `on`, `1e3` or `0o17`. So a text is
written plain only when it cannot be anything but a text, and in double quotes otherwise.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from launch_templates import own_version
from launch_templates.errors import BadFile, BadValue
from launch_templates.kinds import Kind, load_kind
from launch_templates.lint.documents import Document, read_workloads
from launch_templates.names import MAX_LABEL_LENGTH
from launch_templates.settings import read_spec
from launch_templates.values import plain_copy


def render_manifest(
    kind_name: str, values: Mapping[str, Any], script: Sequence[str] = (), patch: Sequence[Document] = ()
) -> str:
    """YAML text of a manifest, or text of a script, with a short head comment.

    Args:
        kind_name: one of `list_kinds()`.
        values: fields of JobSpec, as text or as YAML types.
        script: SCRIPT ARGS for msrun, and options of msrun before it; the process gets these bytes exactly.
        patch: documents to merge into the manifest.

    Raises:
        UnknownName: a kind or field that does not exist.
        MissingValue: a required field is not given.
        BadValue: a value breaks its constraint, or the kind has no place for it.
        BadFile: a patch that fits no object.
    """
    kind = load_kind(kind_name)
    spec = read_spec(kind, {**values, "script": list(script)} if script else values)
    built = kind.build(spec)
    if kind.is_manifest and not isinstance(built, str):
        known = [Document("", body) for body in built]
        names = [*(workload.longest_pod_name for workload in read_workloads(known)), *(one.name for one in known)]
        longest = max(names, key=len)
        if len(longest) > MAX_LABEL_LENGTH:
            constraint = f"at most {MAX_LABEL_LENGTH - (len(longest) - len(spec.name))} characters here"
            raise BadValue("name", spec.name, f"{constraint}, because of the name {longest}", "choose a shorter name")
        return f"{_head(kind, built)}{dump_documents(apply_patch(built, patch))}"
    if patch:
        raise BadFile(patch[0].source, f"a {kind.name} is no manifest of Kubernetes", "change its text, or the values")
    text = built if isinstance(built, str) else dump_documents(built)
    first, newline, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    return f"{first}{newline}{_head(kind)}{rest}"


def _head(kind: Kind, documents: Sequence[Mapping[str, Any]] = ()) -> str:
    head = f"# {kind.name}: {kind.summary}\n# Written by launch-template {own_version()}"
    if not documents:
        return f"{head}\n"
    return (
        f"{head} for {', '.join(dict.fromkeys(body['apiVersion'] for body in documents))}\n"
        "# After an edit by hand run: launch-template lint FILE\n"
        "# Start: kubectl apply -f FILE    Stop: kubectl delete -f FILE\n"
    )


_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}
"""Lists whose items are not told apart by their name alone."""


def apply_patch(bodies: list[Any], patch: Sequence[Document]) -> list[Any]:
    """Return the manifest with each document of a patch merged into the one object of its kind and, if given, name."""
    patched = [Document("", body) for body in bodies]
    for document in patch:
        try:
            over = plain_copy(document.body)
        except ValueError:
            problem = f"the patch of {document.label} holds what is no Kubernetes YAML, such as a date"
            raise BadFile(document.source, problem, "put dates into quotes") from None
        fits = [one for one in patched if one.kind == document.kind and document.name in ("", one.name)]
        if len(fits) != 1:
            problem = f"a patch of {document.label} fits {len(fits)} of the rendered objects"
            remedy = f"give kind and metadata.name of one of: {', '.join(one.label for one in patched)}"
            raise BadFile(document.source, problem, remedy)
        patched = [Document("", _merge(one.body, over)) if one is fits[0] else one for one in patched]
    return [one.body for one in patched]


def _merge(base: Any, over: Any, field: str = "") -> Any:
    """Return `base` as it is after a patch, which stays as it is."""
    if isinstance(over, dict):
        merged = dict(base) if isinstance(base, dict) else {}
        for key, value in over.items():
            merged[key] = _merge(merged.get(key), value, key)
        return {key: value for key, value in merged.items() if value is not None}
    if not isinstance(over, list):
        return over
    key, items = _KEYS.get(field, "name"), base if isinstance(base, list) else []
    if not all(isinstance(item, dict) and key in item for item in [*over, *items]):
        return [_merge(None, item) for item in over]
    found = {item[key]: item for item in items}
    for item in over:
        if item.get("$patch") == "delete":
            found.pop(item[key], None)
        else:
            found[item[key]] = _merge(found.get(item[key]), item)
    return list(found.values())


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_./][A-Za-z0-9]+)*")
_WORDS_WITH_A_MEANING = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
_ENDLESS = 2**31  # line width: a search for an argument finds it


class _Dumper(yaml.SafeDumper):
    """Block style, keys in the given order, sequences indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)  # noqa: FBT003 - PyYAML takes it by position


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS_WITH_A_MEANING
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def dump_documents(documents: Iterable[Any]) -> str:
    """YAML text of one or more documents, ending with a newline; raises ValueError for what is no plain YAML."""
    return "---\n".join(
        yaml.dump(plain_copy(document), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_ENDLESS)
        for document in documents
    )

"""A spec for a kind -> a manifest or a script. Pure.

What `render_manifest` returns passes this package's own lint without an error; tests hold that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch_templates.emit import dump_documents
from launch_templates.errors import BadFile, BadValue, MissingValue, UnknownName
from launch_templates.kinds import Kind, load_kind, takers
from launch_templates.lint.document import Document
from launch_templates.lint.workload import read_workloads
from launch_templates.names import MAX_LABEL_LENGTH
from launch_templates.patch import apply_patch
from launch_templates.spec import JobSpec, settings_of_spec
from launch_templates.spec_checks import check_together


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
    if kind.build is not None:
        documents = kind.build(spec)
        _check_names(documents, spec.name)
        return f"{_head(kind, documents)}{dump_documents(apply_patch(documents, list(patch)))}"
    if patch:
        raise BadFile(patch[0].source, f"a {kind.name} is no manifest of Kubernetes", "change its text, or the values")
    text = kind.write(spec) if kind.write else ""
    first, newline, rest = text.partition("\n") if text.startswith("#!") else ("", "", text)
    return f"{first}{newline}{_head(kind)}{rest}"


def read_spec(kind: Kind, given: Mapping[str, Any]) -> JobSpec:
    """The checked spec, defaults filled in.

    Raises:
        UnknownName: `given` has a name that no spec has.
        MissingValue: a field that the kind requires is not given.
        BadValue: a value breaks its constraint, or the kind has no place for it.
    """
    known = settings_of_spec()
    own = {setting.name: setting for setting in kind.settings}
    for name in given:
        if name not in known:
            raise UnknownName("setting", name, own)
    values: dict[str, Any] = {name: known[name].read(value) for name, value in given.items()}
    for name, value in values.items():
        if name not in own and value != known[name].default and name not in ("name", "image"):
            remedy = f"remove it, or choose {', '.join(takers(name))}"
            raise BadValue(name, given[name], f"left out: a job of the kind {kind.name} has no place for it", remedy)
    missing = [name for name, setting in own.items() if setting.is_required and name not in given]
    if missing:
        raise MissingValue(kind.name, missing)
    spec = JobSpec(**values)
    check_together(spec, own)
    if "device_target" in own and spec.device_target not in kind.device_targets:
        targets = " or ".join(kind.device_targets)
        remedy = f"add --set device_target={kind.device_targets[0]}"
        raise BadValue("device_target", spec.device_target, f"{targets} with {kind.name}", remedy)
    return spec


def _check_names(documents: list[Any], name: str) -> None:
    known = [body["metadata"]["name"] for body in documents]
    workloads = read_workloads([Document("", body) for body in documents])
    for longest in [*(workload.longest_pod_name for workload in workloads), *known]:
        if len(longest) > MAX_LABEL_LENGTH:
            room = MAX_LABEL_LENGTH - (len(longest) - len(name))
            constraint = f"at most {room} characters here, because of the name {longest}"
            raise BadValue("name", name, constraint, "choose a shorter name")


def _head(kind: Kind, documents: Sequence[Mapping[str, Any]] = ()) -> str:
    from launch_templates.version import own_version

    head = f"# {kind.name}: {kind.summary}\n# Written by launch-template {own_version()}"
    if not documents:
        return f"{head}\n"
    return (
        f"{head} for {', '.join(dict.fromkeys(body['apiVersion'] for body in documents))}\n"
        "# After an edit by hand run: launch-template lint FILE\n"
        "# Start: kubectl apply -f FILE    Stop: kubectl delete -f FILE\n"
    )

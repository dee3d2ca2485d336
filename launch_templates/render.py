"""Template + values -> manifest. Pure.

What `render_manifest` returns passes this package's own lint without an error; tests hold that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from launch_templates.emit import dump_documents
from launch_templates.errors import BadValue, MissingValue, UnknownName
from launch_templates.fill import fill
from launch_templates.job import build_values
from launch_templates.lint.document import Document
from launch_templates.lint.workload import read_workloads
from launch_templates.names import MAX_LABEL_LENGTH
from launch_templates.template import Template, load_template


def render_manifest(template_name: str, values: Mapping[str, Any], script: Sequence[str] = ()) -> str:
    """YAML text of a manifest, with a short head comment.

    Args:
        template_name: one of `list_templates()`.
        values: placeholder names to values, as text or as YAML types.
        script: SCRIPT ARGS for msrun; the process gets these bytes exactly.

    Raises:
        UnknownName: a template or placeholder that does not exist.
        MissingValue: a required placeholder is not given.
        BadValue: a value breaks its constraint.
    """
    template = load_template(template_name)
    documents = render_documents(template, values, script)
    return f"{_head(template)}{dump_documents(documents)}"


def render_documents(template: Template, values: Mapping[str, Any], script: Sequence[str] = ()) -> list[Any]:
    """The manifest as parsed YAML documents; arguments and errors as in `render_manifest`."""
    given = {**values, "script": list(script)} if script else dict(values)
    names = build_values(read_values(template, given))
    filled = [fill(document, names) for document in template.documents]
    documents = [document for document in filled if document is not None]
    _check_pod_names(documents, names["name"])
    return documents


def read_values(template: Template, given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values of all placeholders of a template, defaults filled in.

    Raises:
        UnknownName: `given` has a name that the template lacks.
        MissingValue: a required placeholder is not given.
        BadValue: a value breaks its constraint.
    """
    known = {placeholder.name: placeholder for placeholder in template.placeholders}
    for name in given:
        if name not in known:
            raise UnknownName(f"placeholder of template {template.name!r}:", name, known)
    missing = [name for name, placeholder in known.items() if placeholder.is_required and name not in given]
    if missing:
        raise MissingValue(template.name, missing)
    return {name: placeholder.read(given.get(name, placeholder.default)) for name, placeholder in known.items()}


def _check_pod_names(documents: list[Any], name: str) -> None:
    for workload in read_workloads([Document("", body) for body in documents]):
        longest = workload.longest_pod_name
        if len(longest) > MAX_LABEL_LENGTH:
            room = MAX_LABEL_LENGTH - (len(longest) - len(name))
            constraint = f"at most {room} characters here, because the last pod is called {longest}"
            raise BadValue("name", name, constraint, "choose a shorter name")


def _head(template: Template) -> str:
    return (
        f"# {template.name}: {template.summary}\n"
        "# Written by launch-template; after an edit by hand run: launch-template lint FILE\n"
        "# Start: kubectl apply -f FILE    Stop: kubectl delete -f FILE\n"
    )

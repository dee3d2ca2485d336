"""The kinds that a job can be rendered for, read from their YAML files.

A file `manifests/NAME.yaml` is a kind; its first comment line is `NAME: summary`. Its first document holds facts:

    pods:                   names of pods, which `${NAME}` below stands for, with what differs from fragments/pod.yaml
      pod:
        master_addr: ...    where the msrun of node rank 0 is found
        node_rank: ...      reference to the variable that tells a pod its index; left out: msrun finds it out
    device_targets: [...]   device targets that the kind takes; left out: all

A file in fragments/ is a part of several kinds: `${network_policy_document}` is fragments/network_policy.yaml.
Kinds that are no Kubernetes objects are in scripts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from launch_templates import scripts
from launch_templates.errors import UnknownName
from launch_templates.fill import find_placeholders
from launch_templates.job import ARGS_NEEDS, DERIVED
from launch_templates.spec import JobSpec, Setting, settings_of_spec

_SUFFIX = ".yaml"
_FRAGMENT = "_document"


@dataclass(frozen=True)
class Kind:
    """One kind of job. Do not change `facts` and `documents`: they are shared."""

    name: str
    comment: str
    """What it is, without comment signs; the first line is `NAME: summary`."""
    documents: tuple[Any, ...] = ()
    """Parsed YAML documents with placeholders in them; none for a script."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[JobSpec], str] | None = None
    """Text of a script; None for manifests."""
    settings: tuple[Setting, ...] = ()
    """What can be set, in the order of JobSpec."""

    @property
    def summary(self) -> str:
        """What it is, in one line."""
        return self.comment.partition("\n")[0].partition(": ")[2]

    @property
    def api_versions(self) -> list[str]:
        """API versions of its objects, in order; none for a script."""
        return list(dict.fromkeys(one["apiVersion"] for one in self.documents if "apiVersion" in one))


def list_kinds() -> list[str]:
    """Names of all kinds, sorted."""
    folder = files("launch_templates") / "manifests"
    found = [item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.endswith(_SUFFIX)]
    return sorted([*found, *scripts.SCRIPTS])


@cache
def load_kind(name: str) -> Kind:
    """The kind of that name.

    Raises:
        UnknownName: there is none.
    """
    known = list_kinds()
    if name not in known:
        raise UnknownName("kind", name, known)
    if name in scripts.SCRIPTS:
        script = scripts.SCRIPTS[name]
        return Kind(name, script.comment, write=script.write, settings=_ordered(script.takes))
    text = (files("launch_templates") / "manifests" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    facts, *bodies = yaml.load_all(text, Loader=_LOADER)
    documents = tuple(_fragment_or(body) for body in bodies)
    used = {*find_placeholders([facts, *documents, load_fragment("pod")]), *ARGS_NEEDS}
    needs = {need for one in used for need in (DERIVED[one].needs if one in DERIVED else (one,))}
    if load_fragment("rank_table") not in documents:
        needs.discard("rank_table")  # the pod of every kind could mount one
    return Kind(name, _head_comment(text), documents, facts, settings=_ordered(needs))


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def load_fragment(name: str) -> Any:
    """The parsed YAML of fragments/NAME.yaml."""
    text = (files("launch_templates") / "fragments" / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - a safe loader


def _fragment_or(body: Any) -> Any:
    if not isinstance(body, str):
        return body
    return load_fragment(body.removeprefix("${").removesuffix(f"{_FRAGMENT}}}"))


def _ordered(names: Iterable[str]) -> tuple[Setting, ...]:
    return tuple(one for name, one in settings_of_spec().items() if name in names)


def takers(name: str) -> Iterator[str]:
    """Kinds that take a field."""
    return (kind for kind in list_kinds() if any(one.name == name for one in load_kind(kind).settings))


def _head_comment(text: str) -> str:
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines)

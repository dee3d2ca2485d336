"""The keys that Kubernetes objects may have, out of its JSON schemas and of resource definitions.

    python tests/support/kubernetes_keys.py [CRD.yaml]... > launch_templates/lint/kubernetes_keys.json

The result is {type: {key: type of the value, or ""}}: "" may hold anything, a list has the type of its items. Types of
resource definitions are named by the path at which they stand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
ROOTS = {
    "batch/v1 Job": "io.k8s.api.batch.v1.Job",
    "v1 Pod": "io.k8s.api.core.v1.Pod",
    "v1 Service": "io.k8s.api.core.v1.Service",
    "v1 ConfigMap": "io.k8s.api.core.v1.ConfigMap",
    "networking.k8s.io/v1 NetworkPolicy": "io.k8s.api.networking.v1.NetworkPolicy",
}
POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
Types = dict[str, dict[str, str]]


def newest() -> str:
    """Return the newest version whose schemas are here, such as v1.37.0."""
    versions = [path.name.removesuffix("-local") for path in SCHEMAS.iterdir() if path.name.endswith("-local")]
    return max(versions, key=lambda name: [int(part) for part in name.removeprefix("v").split(".")])


def core_types() -> Types:
    """Return the types that the objects of ROOTS are made of, under their last names."""
    definitions = json.loads((SCHEMAS / f"{newest()}-local" / "_definitions.json").read_text())["$defs"]
    found: Types = {}
    waiting = list(ROOTS.values())
    while waiting:
        name = waiting.pop()
        if name not in found and "properties" in definitions[name]:
            found[name] = {key: _reference(schema) for key, schema in definitions[name]["properties"].items()}
            waiting += [reference for reference in found[name].values() if reference]
    plain = {
        _short(name): {key: _short(kind) if kind in found else "" for key, kind in keys.items()}
        for name, keys in found.items()
    }
    return {**plain, **{kind: plain[_short(name)] for kind, name in ROOTS.items()}}


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _reference(schema: dict[str, Any]) -> str:
    inner = schema.get("items") or {}
    options = [*schema.get("allOf", []), *schema.get("anyOf", []), *inner.get("allOf", []), schema, inner]
    target = next((option["$ref"] for option in options if "$ref" in option), "")
    return str(target).rpartition("/")[2].rpartition("#")[2]


def types_of_definition(definition: dict[str, Any]) -> Types:
    """Return the types of the newest version of a CustomResourceDefinition."""
    spec = definition["spec"]
    version = next(one for one in reversed(spec["versions"]) if one["served"])
    name = f"{spec['group']}/{version['name']} {spec['names']['kind']}"
    found: Types = {}
    _add(found, name, version["schema"]["openAPIV3Schema"])
    found[name] = {"apiVersion": "", "kind": "", "metadata": _short(METADATA), **_own(found[name])}
    return found


def _own(keys: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in keys.items() if key not in ("apiVersion", "kind", "metadata")}


def _add(found: Types, name: str, schema: dict[str, Any]) -> str:
    """Add the type of an object and return its name; "" for what may hold anything."""
    if schema.get("type") == "array":
        return _add(found, name, schema.get("items") or {})
    properties = schema.get("properties")
    if not properties:
        inner = schema.get("additionalProperties")
        return f"*{_add(found, name, inner)}" if isinstance(inner, dict) and inner.get("properties") else ""
    if "containers" in (properties.get("spec") or {}).get("properties", {}):
        return _short(POD_TEMPLATE)
    found[name] = {}
    for key, value in properties.items():
        if key != "status":
            found[name][key] = _add(found, f"{name}.{key}", value)
        else:
            found[name][key] = ""
    return name


def main(paths: list[str]) -> None:
    """Print the table of the core types and of the definitions in files."""
    types = core_types()
    for path in paths:
        for definition in yaml.safe_load_all(Path(path).read_text()):
            types |= types_of_definition(definition)
    table = {name: dict(sorted(keys.items())) for name, keys in sorted(types.items())}
    print(json.dumps({"kubernetes": newest(), "types": table}, separators=(",", ":")))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Objects against the schemas of their kinds, strictly: what a schema does not name is refused.

schemas.json holds those of Kubernetes and of the definitions (CRDs) of the kinds, each with its source and version. It
is made by .ci/kubernetes_schemas.py. Rules in CEL (x-kubernetes-validations) and webhooks are not in it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from launch_templates.lint.documents import Document, mapping, sequence, text
from launch_templates.lint.rules import Finding, Rule, Severity

Schema = dict[str, Any]

UNKNOWN_KEY = Rule("unknown-key", Severity.ERROR, "A key that objects of this kind do not have; it would be dropped.")
MISSING_KEY = Rule("missing-key", Severity.ERROR, "A key without which the API server refuses the object.")
WRONG_TYPE = Rule("wrong-type", Severity.ERROR, "A text where a number belongs, 1 or true where a text belongs, ...")
WRONG_VALUE = Rule("wrong-value", Severity.ERROR, "A value outside the schema's list, pattern or limits.")
NO_SCHEMAS = Rule("no-schemas", Severity.WARNING, "jsonschema is not installed: keys and types are not checked.")
RULES = (UNKNOWN_KEY, MISSING_KEY, WRONG_TYPE, WRONG_VALUE, NO_SCHEMAS)

_KEPT = frozenset({
    "type", "required", "enum", "pattern", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength",
})  # fmt: skip
_TYPES = {"object": "a mapping", "array": "a list", "string": "a text", "boolean": "true or false", "null": "nothing"}
_INSTANCES = {dict: "a mapping", list: "a list", str: "a text", bool: "a flag", int: "a number", float: "a number"}


@cache
def load_table() -> Mapping[str, Any]:
    """Return `kinds` ("APIVERSION KIND" -> name in `$defs`), `sources` (the same -> source) and `$defs`."""
    table: dict[str, Any] = json.loads((files("launch_templates.lint") / "schemas.json").read_text(encoding="utf-8"))
    return table


def compact(schema: Schema) -> Schema:
    """Return the schema of a definition (OpenAPI 3) as a JSON schema that refuses unknown keys, without prose."""
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    made: Schema = {key: schema[key] for key in _KEPT & schema.keys()}
    if "required" in made:  # the API server fills in defaults first
        inner = schema.get("properties", {})
        made["required"] = [name for name in made["required"] if "default" not in inner.get(name, {})]
    if "properties" in schema:
        made["properties"] = {name: compact(inner) for name, inner in schema["properties"].items() if name != "status"}
        if "status" in schema["properties"]:
            made["properties"]["status"] = {}
        if not schema.get("x-kubernetes-preserve-unknown-fields") and "additionalProperties" not in schema:
            made["additionalProperties"] = False
    for key in {"additionalProperties", "items"} & schema.keys():
        made[key] = compact(schema[key]) if isinstance(schema[key], dict) else schema[key]
    if schema.get("nullable") is True and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def schemas_of_definitions(documents: Sequence[Document]) -> dict[str, Schema]:
    """Return "APIVERSION KIND" -> schema of the CustomResourceDefinitions among documents."""
    found = {}
    for document in documents:
        spec = mapping(document.body, "spec")
        for version in sequence(spec, "versions") if document.kind == "CustomResourceDefinition" else ():
            schema = compact(mapping(version, "schema", "openAPIV3Schema"))
            found[f"{text(spec, 'group')}/{text(version, 'name')} {text(spec, 'names', 'kind')}"] = schema
    return found


def find_faults(documents: Sequence[Document], definitions: Sequence[Document]) -> list[Finding]:
    """Return what the schemas of Kubernetes, of the kinds, and of `definitions`, which go over both, refuse."""
    table = load_table()
    known = {name: {"$ref": f"#/$defs/{place}"} for name, place in table["kinds"].items()}
    known |= schemas_of_definitions(definitions)
    named = [(document, f"{text(document.body, 'apiVersion')} {document.kind}") for document in documents]
    checked = [(document, known[name]) for document, name in named if name in known]
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        remedy = "pip install 'msrun[templates]'"
        return [NO_SCHEMAS.found(document, "", NO_SCHEMAS.meaning, remedy) for document, _ in checked[:1]]
    return [
        finding
        for document, schema in checked
        for error in Draft202012Validator({**schema, "$defs": table["$defs"]}).iter_errors(document.body)
        for finding in _findings(document, error)
    ]


def _findings(document: Document, error: Any) -> Iterator[Finding]:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path)
    path = "".join(steps).removeprefix(".")
    if error.validator == "additionalProperties":
        keys = error.schema.get("properties", {})
        for key in sorted(map(str, (key for key in error.instance if key not in keys))):
            near = get_close_matches(key, keys, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "remove it"
            place = f"{path}.{key}" if path else key
            yield UNKNOWN_KEY.found(document, place, f"{key!r} is no key of {path or document.kind}", remedy)
    elif error.validator == "required":
        [key] = [key for key in error.validator_value if error.message.startswith(repr(key))][:1]
        yield MISSING_KEY.found(document, path, f"{key!r} is missing", f"add {key}")
    elif error.validator == "type":
        wanted = error.validator_value if isinstance(error.validator_value, list) else [error.validator_value]
        words = " or ".join(_TYPES.get(one, "a number") for one in wanted if one != "null")
        given = _INSTANCES.get(type(error.instance), "nothing")
        value = "" if isinstance(error.instance, dict | list | None) else f"{error.instance!r} is "
        unquoted = "write it without quotes" if given == "a text" else f"write {words}"
        remedy = "put it into quotes" if "string" in wanted else unquoted
        yield WRONG_TYPE.found(document, path, f"{value}{given}, not {words}"[-200:], remedy)
    else:
        yield WRONG_VALUE.found(document, path, error.message[:200], "see the schema of the kind")

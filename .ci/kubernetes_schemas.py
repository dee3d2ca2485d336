"""Makes launch_templates/lint/schemas.json of the schemas of kubernetes-validate and of files with definitions.

    python .ci/kubernetes_schemas.py SOURCE=CRD.yaml... > launch_templates/lint/schemas.json

SOURCE is where the file is from: OWNER/REPOSITORY@COMMIT. Parts that occur twice are kept once.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import kubernetes_validate

from launch_templates.lint.documents import read_documents
from launch_templates.lint.schemas import compact, schemas_of_definitions

FOLDER = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
VERSION = "v1.37.0"
CORE = (
    "v1 ConfigMap", "v1 Namespace", "v1 PersistentVolumeClaim", "v1 Pod", "v1 Secret", "v1 Service",
    "v1 ServiceAccount", "batch/v1 CronJob", "batch/v1 Job", "networking.k8s.io/v1 NetworkPolicy",
    "resource.k8s.io/v1 ResourceClaimTemplate",
)  # fmt: skip
SMALL = 60
"""Characters up to which a part stands where it is used."""


def core_schemas():
    """Return the schemas of Kubernetes' own kinds, and that of metadata."""
    definitions = json.loads((FOLDER / f"{VERSION}-local" / "_definitions.json").read_text())["$defs"]
    kinds = {}
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", []):
            group = f"{kind['group']}/" if kind["group"] else ""
            kinds[f"{group}{kind['version']} {kind['kind']}"] = name
    whole = {name: compact(resolve({"$ref": kinds[name]}, definitions)) for name in CORE}
    whole["metadata"] = compact(resolve({"$ref": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}, definitions))
    return whole


def resolve(node, definitions):
    """Put what is referred to in its place; a choice between plain types becomes a list of types."""
    if isinstance(node, list):
        return [resolve(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        name = node["$ref"].rpartition("/")[2].rpartition("#")[2]
        return resolve(definitions[name], definitions)
    if len(node.get("allOf", [])) == 1 and "properties" not in node:
        return resolve(node["allOf"][0], definitions)
    made = {key: resolve(value, definitions) for key, value in node.items()}
    for key in ("oneOf", "anyOf"):
        if key in made and all(isinstance(one, dict) and "type" in one for one in made[key]):
            types = [one["type"] if isinstance(one["type"], list) else [one["type"]] for one in made.pop(key)]
            made["type"] = list(dict.fromkeys(one for several in types for one in several))
    return made


def fold(schemas):
    """Return names and `$defs` in which each part that occurs twice stands once."""
    counts = Counter()
    for schema in schemas.values():
        counts.update(_parts(schema))
    places = {}
    defs = {}

    def place(schema):
        text = _text(schema)
        made = {
            key: {name: place(one) for name, one in value.items()}
            if key == "properties"
            else place(value)
            if key == "items" or (key == "additionalProperties" and isinstance(value, dict))
            else value
            for key, value in schema.items()
        }
        if len(text) <= SMALL or counts[text] < 2:
            return made
        if text not in places:
            places[text] = str(len(places))
            defs[places[text]] = made
        return {"$ref": f"#/$defs/{places[text]}"}

    kinds = {}
    for name, schema in sorted(schemas.items()):
        made = place(schema)
        kinds[name] = made["$ref"].rpartition("/")[2] if "$ref" in made else f"k{len(kinds)}"
        if "$ref" not in made:
            defs[kinds[name]] = made
    return {"kinds": kinds, "$defs": defs}


def _text(schema):
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))


def _parts(schema):
    inner = [*schema.get("properties", {}).values()]
    inner += [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
    return [_text(schema), *(part for one in inner for part in _parts(one))]


def make_table(files):
    """Return the table of the core kinds and of the definitions in files, each with its source."""
    schemas = core_schemas()
    sources = dict.fromkeys(CORE, f"kubernetes/kubernetes@{VERSION} (kubernetes-validate)")
    metadata = schemas["metadata"]
    for path, source in files.items():
        for name, schema in schemas_of_definitions(read_documents(path.read_text(), str(path))).items():
            schema["properties"]["metadata"] = metadata
            if name.endswith(" JobSet"):  # its webhook names them before the API server looks
                rules = schema["properties"]["spec"]["properties"]["failurePolicy"]["properties"]["rules"]
                rules["items"]["required"].remove("name")
            schemas[name] = schema
            sources[name] = source
            if name.endswith(" TrainingRuntime"):  # differs in its scope alone
                cluster = name.replace(" TrainingRuntime", " ClusterTrainingRuntime")
                schemas[cluster], sources[cluster] = schema, source
    folded = fold(schemas)
    return {"metadata": folded["kinds"].pop("metadata"), "sources": dict(sorted(sources.items())), **folded}


if __name__ == "__main__":
    given = dict(reversed(word.split("=", 1)) for word in sys.argv[1:])
    print(json.dumps(make_table({Path(path): source for path, source in given.items()}), separators=(",", ":")))

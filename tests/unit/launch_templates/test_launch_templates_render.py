"""Rendering: golden manifests, schema checks, and text that must come through unharmed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_templates import (
    BadValue,
    MissingValue,
    UnknownName,
    lint_texts,
    list_templates,
    load_template,
    render_manifest,
)
from launch_templates.catalogue import BY_NAME
from launch_templates.fill import find_placeholders
from launch_templates.job import DERIVED
from launch_templates.lint.document import Document
from launch_templates.lint.workload import Workload, read_workloads

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "launch_templates"
UPDATE = "LAUNCH_TEMPLATES_UPDATE_GOLDEN"
TEMPLATES = list_templates()
MINIMAL = {"name": "train", "image": "registry.example/train:1"}
FULL = {
    **MINIMAL,
    "namespace": "ml",
    "nodes": 3,
    "local_worker_num": 4,
    "device_target": "GPU",
    "memory": "64Gi",
    "queue": "team-a",
    "pull_secret": "registry",
    "node_selector": {"node.example/pool": "h200"},
    "env": {"NCCL_DEBUG": "WARN"},
    "secret_env": {"HF_TOKEN": "hugging-face:token"},
    "claims": {"data": "/data:ro", "results": "/results"},
    "log_dir": "/results/logs",
}
CASES: dict[str, dict[str, Any]] = {
    "minimal": MINIMAL,
    "full": FULL,
    "ascend": {**MINIMAL, "device_target": "ascend", "nodes": 1, "network_policy": False},
}
ALL_CASES = [(template, case) for template in TEMPLATES for case in CASES]


def render(template: str, values: dict[str, Any] | None = None, script: list[str] | None = None) -> str:
    return render_manifest(template, MINIMAL if values is None else values, script or ["train.py", "--lr", "0.1"])


def workload_of(text: str) -> Workload:
    [workload] = read_workloads([Document("", body) for body in yaml.safe_load_all(text)])
    return workload


def containers_of(text: str) -> list[dict[str, Any]]:
    return [container.body for pods in workload_of(text).pod_sets for container in pods.containers]


def expand_as_kubelet(text: str, variables: dict[str, str]) -> str:
    """What the kubelet makes of one argument or variable value (k8s.io/kubernetes third_party expansion.go)."""
    result, cursor = "", 0
    while cursor < len(text):
        following = text[cursor + 1 : cursor + 2]
        if text[cursor] != "$" or not following:
            result, cursor = result + text[cursor], cursor + 1
        elif following == "$":
            result, cursor = result + "$", cursor + 2
        elif following == "(" and ")" in text[cursor + 2 :]:
            end = text.index(")", cursor + 2)
            name = text[cursor + 2 : end]
            result, cursor = result + variables.get(name, f"$({name})"), end + 1
        else:
            result, cursor = result + "$" + following, cursor + 2
    return result


@pytest.mark.parametrize(("template", "case"), ALL_CASES)
def test_rendered_manifests_equal_the_recorded_ones(template: str, case: str) -> None:
    rendered = render(template, CASES[case])
    record = GOLDEN / f"{template}-{case}.yaml"
    if os.environ.get(UPDATE) == "1":
        record.write_text(rendered, encoding="utf-8")
        pytest.skip(f"{record.name} written because {UPDATE}=1")
    assert rendered == record.read_text(encoding="utf-8"), f"if this is wanted, run once with {UPDATE}=1"


def test_every_recorded_manifest_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {f"{template}-{case}" for template, case in ALL_CASES}


@pytest.mark.parametrize(("template", "case"), ALL_CASES)
def test_core_kinds_satisfy_the_kubernetes_schema(template: str, case: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    core = ("v1", "batch/v1", "networking.k8s.io/v1")
    for document in yaml.safe_load_all(render(template, CASES[case])):
        if document["apiVersion"] in core:
            validator.validate(document, "1.31", strict=True)


@pytest.mark.parametrize("template", TEMPLATES)
def test_pods_of_every_kind_satisfy_the_kubernetes_schema(template: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for pods in workload_of(render(template, FULL)).pod_sets:
        pod = {"apiVersion": "v1", "kind": "Pod", **pods.template}
        validator.validate(pod, "1.31", strict=True)


@pytest.mark.parametrize(("template", "case"), ALL_CASES)
def test_rendered_manifests_have_no_findings(template: str, case: str) -> None:
    assert lint_texts([("-", render(template, CASES[case]))]) == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_head_comments_list_exactly_the_placeholders_in_use(template: str) -> None:
    loaded = load_template(template)
    listed = loaded.comment.partition("Placeholders:")[2].split()
    assert listed == [placeholder.name for placeholder in loaded.placeholders]
    assert "Ranks:" in loaded.comment
    assert loaded.summary


@pytest.mark.parametrize("template", TEMPLATES)
def test_manifests_use_only_known_placeholders(template: str) -> None:
    assert set(find_placeholders(list(load_template(template).documents))) <= BY_NAME.keys() | DERIVED.keys()


def test_every_placeholder_is_used_by_a_template() -> None:
    used = {placeholder.name for template in TEMPLATES for placeholder in load_template(template).placeholders}
    assert used == BY_NAME.keys()


def test_all_kinds_start_the_same_pod_but_for_rank_address_and_names() -> None:
    def neutral(template: str) -> str:
        spec = workload_of(render(template, FULL)).pod_sets[-1].spec
        [container] = spec["containers"]
        # the training-operator sets this variable itself
        container["env"] = [item for item in container["env"] if item["name"] != "PYTHONUNBUFFERED"]
        container["name"] = container["ports"][0]["name"] = "any"
        text = yaml.safe_dump({key: value for key, value in spec.items() if key != "subdomain"})
        return re.sub(r"--(master_addr|node_rank)=\S+", r"--\1=X", text)

    assert len({neutral(template) for template in TEMPLATES}) == 1


# Hostile text


HOSTILE = [
    "a: b",
    "- x",
    "${name}",
    "$(JOB_COMPLETION_INDEX)",
    "$$(A)",
    "$$",
    "$",
    "${",
    "$HOME",
    '"',
    "'",
    "\\",
    "\n---\nkind: Secret\n",
    "#",
    " ",
    "\t",
    "\r\n",
    "\x85",
    "\u2028",
    "\ufeff",
    "\x7f",
    "\x1b[0m",
    "é中😀",
    "null",
    "~",
    "y",
    "No",
    "on",
    "1e3",
    "0o17",
    "0x1f",
    "1:30",
    "1_000",
    ".inf",
    ".5",
    "=",
    "<<",
    "!!python/object:os.system",
    "*a",
    "&a",
    "{}",
    "[]",
    "|",
    ">",
    "%",
    "@",
    "`",
    "2024-01-01",
    "",
]
process_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=30)
hostile_text = st.one_of(st.sampled_from(HOSTILE), process_text, st.text("$(){}AB:- \n\"'#", max_size=12))
ARGUMENTS_BEFORE_SCRIPT = 7


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(arguments=st.lists(hostile_text, max_size=5))
def test_the_script_gets_its_arguments_byte_for_byte(template: str, arguments: list[str]) -> None:
    script = ["train.py", *arguments]
    for container in containers_of(render(template, script=script)):
        assert all(type(argument) is str for argument in container["args"])
        written = container["args"][ARGUMENTS_BEFORE_SCRIPT:]
        variables = {"JOB_COMPLETION_INDEX": "7", "A": "wrong", "name": "wrong", "HOME": "wrong"}
        assert [expand_as_kubelet(argument, variables) for argument in written] == script
        unharmed = [argument for argument in script if "$(" not in argument and "$$" not in argument]
        assert [argument for argument in written if "$$" not in argument] == unharmed


@settings(max_examples=40, deadline=None)
@given(value=hostile_text)
def test_variables_get_their_value_byte_for_byte(value: str) -> None:
    [container] = containers_of(render("jobset", {**MINIMAL, "env": {"SETTING": value}}))
    [written] = [item["value"] for item in container["env"] if item["name"] == "SETTING"]
    assert type(written) is str
    assert expand_as_kubelet(written, {"A": "wrong", "JOB_COMPLETION_INDEX": "wrong"}) == value


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from([n for n in BY_NAME if n != "script"]), value=hostile_text)
def test_hostile_settings_are_refused_or_change_no_structure(name: str, value: str) -> None:
    values = {**MINIMAL, name: {"KEY": value} if BY_NAME[name].value_type.type_name == "table" else value}
    try:
        rendered = render("indexed-job", values)
    except (BadValue, UnknownName):
        return
    kinds = [document["kind"] for document in yaml.safe_load_all(rendered)]
    assert kinds in (["Service", "NetworkPolicy", "Job"], ["Service", "Job"])


@pytest.mark.parametrize("text", [word for word in HOSTILE if re.fullmatch(r"[\x20-\x7e]*", word)])
def test_texts_that_some_yaml_parser_could_misread_are_quoted(text: str) -> None:
    rendered = render("jobset", script=["train.py", text])
    [line] = [line.strip() for line in rendered.splitlines() if line.endswith("train.py")]
    following = rendered.split(line + "\n", 1)[1].splitlines()[0].strip()
    assert following.startswith('- "'), following


# Values


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"name": "Train"}, "name"),
        ({"name": "1train"}, "name"),
        ({"name": "train-"}, "name"),
        ({"name": "a" * 60}, "name"),
        ({"name": "train\n"}, "name"),
        ({"image": "train image"}, "image"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": True}, "nodes"),
        ({"nodes": "2.0"}, "nodes"),
        ({"nodes": "²"}, "nodes"),
        ({"nodes": None}, "nodes"),
        ({"master_port": 80}, "master_port"),
        ({"master_port": "65536"}, "master_port"),
        ({"device_target": "TPU"}, "device_target"),
        ({"device_resource": "nvidia.com/gpu"}, "device_resource"),
        ({"memory": "32GB"}, "memory"),
        ({"cpu": "0"}, "cpu"),
        ({"shm_size": "32Gi"}, "shm_size"),
        ({"network_policy": "maybe"}, "network_policy"),
        ({"user_id": 0}, "user_id"),
        ({"log_dir": "logs"}, "log_dir"),
        ({"log_dir": "/logs"}, "log_dir"),
        ({"log_dir": "/logs/../etc"}, "log_dir"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A B": "1"}}, "env"),
        ({"env": {"A": "\0"}}, "env"),
        ({"env": {"JOB_COMPLETION_INDEX": "0"}}, "env"),
        ({"env": ["A=1"]}, "env"),
        ({"env": {"WANDB_API_KEY": "x"}}, "env.WANDB_API_KEY"),
        ({"env": {"A": "1"}, "secret_env": {"A": "s:k"}}, "env.A"),
        ({"secret_env": {"HF_TOKEN": "no-key"}}, "secret_env"),
        ({"claims": {"data": "data"}}, "claims"),
        ({"claims": {"a": "/data", "b": "/data:ro"}}, "claims.a"),
        ({"claims": {"a": "/dev/shm"}}, "claims.a"),
        ({"claims": {"a": "/logs:ro"}}, "claims.a"),
        ({"script": ["a\0b"]}, "script"),
        ({"script": ["\udcff"]}, "script"),
        ({"script": "train.py"}, "script"),
        ({"script": ["--master-port=1", "train.py"]}, "script"),
    ],
)
def test_wrong_values_are_refused_with_the_name_of_the_placeholder(changes: dict[str, Any], culprit: str) -> None:
    with pytest.raises(BadValue) as caught:
        render_manifest("jobset", {**MINIMAL, "script": ["train.py"], **changes})
    assert caught.value.name == culprit
    assert "must be" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refused_variables_do_not_show_their_secret() -> None:
    with pytest.raises(BadValue, match=r"secret_env\.HF_TOKEN=SECRET:KEY") as caught:
        render("jobset", {**MINIMAL, "env": {"HF_TOKEN": "hf_private"}})
    assert "hf_private" not in str(caught.value)


def test_missing_values_are_named_together() -> None:
    with pytest.raises(MissingValue) as caught:
        render_manifest("volcano", {"nodes": 2})
    assert caught.value.names == ("name", "image", "script")


@pytest.mark.parametrize(("name", "hint"), [("node", "nodes"), ("masterport", "master_port"), ("zzz", "choose one of")])
def test_unknown_placeholders_get_a_hint(name: str, hint: str) -> None:
    with pytest.raises(UnknownName, match=hint):
        render("jobset", {**MINIMAL, name: "1"})


def test_placeholders_of_other_templates_are_unknown() -> None:
    with pytest.raises(UnknownName, match="max_restarts"):
        render("indexed-job", {**MINIMAL, "max_restarts": 3})


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 63), nodes=st.integers(1, 2000))
def test_every_pod_name_is_a_dns_label_or_the_name_is_refused(template: str, length: int, nodes: int) -> None:
    try:
        rendered = render(template, {**MINIMAL, "name": "a" * length, "nodes": nodes})
    except BadValue as error:
        assert "at most" in error.constraint
        return
    assert len(workload_of(rendered).longest_pod_name) <= 63


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=20, deadline=None)
@given(nodes=st.integers(1, 50), local=st.integers(1, 16), port=st.integers(1024, 65535))
def test_any_shape_of_job_passes_the_lint(template: str, nodes: int, local: int, port: int) -> None:
    values = {**MINIMAL, "nodes": nodes, "local_worker_num": local, "master_port": port, "device_target": "GPU"}
    assert lint_texts([("-", render(template, values))]) == []


@pytest.mark.parametrize(
    ("target", "resource", "expected"),
    [
        ("CPU", None, {}),
        ("gpu", None, {"nvidia.com/gpu": 4}),
        ("Ascend", None, {"huawei.com/Ascend910": 4}),
        ("Ascend", "huawei.com/npu", {"huawei.com/npu": 4}),
    ],
)
def test_each_worker_gets_one_device(target: str, resource: str | None, expected: dict[str, int]) -> None:
    values = {**MINIMAL, "local_worker_num": "4", "device_target": target, "device_resource": resource}
    for template in TEMPLATES:
        for container in containers_of(render(template, values)):
            limits = container["resources"]["limits"]
            assert {name: amount for name, amount in limits.items() if "/" in name} == expected
            assert container["resources"]["requests"] == limits


def test_logs_on_a_claim_get_no_volume_of_their_own() -> None:
    with_claim = workload_of(render("jobset", FULL)).pod_sets[0].spec
    without = workload_of(render("jobset")).pod_sets[0].spec
    assert [volume["name"] for volume in with_claim["volumes"]] == ["shm", "claim-0", "claim-1"]
    assert [volume["name"] for volume in without["volumes"]] == ["shm", "logs"]


@pytest.mark.parametrize(("restarts", "retries", "action"), [(0, 1, "TerminateJob"), (3, 4, "RestartJob")])
def test_restarts_of_volcano_are_counted_as_its_controller_counts(restarts: int, retries: int, action: str) -> None:
    [document] = yaml.safe_load_all(render("volcano", {**MINIMAL, "max_restarts": restarts}))
    assert document["spec"]["maxRetry"] == retries, "0 would become the default of 3"
    assert [policy["action"] for policy in document["spec"]["policies"]] == ["TerminateJob", action, action]


def test_one_node_has_no_pytorch_workers() -> None:
    *_, document = yaml.safe_load_all(render("pytorchjob", {**MINIMAL, "nodes": 1}))
    assert list(document["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_rendering_twice_gives_the_same_text() -> None:
    assert render("pytorchjob", FULL) == render("pytorchjob", FULL)

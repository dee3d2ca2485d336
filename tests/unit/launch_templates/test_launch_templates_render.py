"""Rendering: golden manifests, schema checks, and text that must come through unharmed."""

import re
import shlex
import subprocess

import kubernetes_validate
import pytest
import yaml
from asked_cases import every_third_fast, one_fast
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_templates import (
    BadValue,
    LaunchTemplateError,
    MissingValue,
    lint_texts,
    list_kinds,
    load_kind,
    own_version,
    render_manifest,
)
from launch_templates.lint.documents import Document, read_workloads
from launch_templates.spec import settings_of_spec

KINDS = list_kinds()
MANIFESTS = [kind for kind in KINDS if load_kind(kind).is_manifest]
NO_MSRUN = ("clustertrainingruntime", "rayjob")
"""Kinds whose pods do not run msrun as they are."""
SCRIPTS = [kind for kind in KINDS if kind not in MANIFESTS]
FEW_FIRST = [
    pytest.param(kind, marks=() if kind in ("jobset", "slurm") else pytest.mark.slow, id=kind) for kind in KINDS
]
"""The kinds, of which a manifest and a script are in the fast half."""
MINIMAL = {"name": "train", "image": "registry.example/train:1"}
FULL = {
    **MINIMAL,
    "namespace": "ml",
    "nodes": 3,
    "local_worker_num": 4,
    "device_target": "GPU",
    "rdma": "rdma/hca_shared",
    "memory": "64Gi",
    "queue": "team-a",
    "priority": "high",
    "service_account": "trainer",
    "pull_secret": "registry",
    "node_selector": {"node.example/pool": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "topology": "topology.example/rack",
    "env": {"NCCL_DEBUG": "WARN"},
    "secret_env": {"HF_TOKEN": "hugging-face:token"},
    "claims": {"data": "/data:ro", "results": "/results"},
    "volumes": {"/scratch": {"emptyDir": {"sizeLimit": "1Ti"}}},
    "log_dir": "/results/logs",
    "deadline_s": 86400,
    "labels": {"team": "vision"},
    "annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net"},
    "pull_policy": "IfNotPresent",
    "init_containers": [{"name": "fetch", "image": "registry.example/fetch:1"}],
    "sidecars": [{"name": "exporter", "image": "registry.example/exporter:1"}],
    "resources": {"accelerators": "H100:4", "use_spot": True},
    "requeue": True,
    "sbatch": {"account": "ml"},
    "srun": {"container-image": "registry.example/train:1"},
    "qsub": {"A": "ml"},
    "bsub": {"P": "ml"},
}
CASES = {
    "minimal": MINIMAL,
    "full": FULL,
    "table": {**MINIMAL, "device_target": "ascend", "rank_table": True, "network_policy": False},
    "spares": {**MINIMAL, "spares": 1, "max_restarts": 2},
}
WITH = {
    case: [kind for kind in MANIFESTS if name in load_kind(kind).takes]
    for case, name in (("table", "rank_table"), ("spares", "spares"))
}
ALL_CASES = [(kind, case) for kind in KINDS for case in CASES if kind in WITH.get(case, KINDS)]


def fitting(kind, values):
    """Those of the values that a kind has a place for, with a device that it takes."""
    found = load_kind(kind)
    own = {name: value for name, value in values.items() if name in {one.name for one in found.settings}}
    return {**own, **({} if "GPU" in found.device_targets else {"device_target": "Ascend"})}


def render_case(kind, case):
    text = render_manifest(kind, fitting(kind, CASES[case]), ["train.py", "--lr", "0.1"])
    return text.replace(f"launch-template {own_version()}", "launch-template VERSION")


def render(template, values=None, script=None):
    return render_manifest(template, MINIMAL if values is None else values, script or ["train.py", "--lr", "0.1"])


def workload_of(text):
    [workload, *_] = read_workloads([Document("", body) for body in yaml.safe_load_all(text)])
    return workload


def containers_of(text):
    return [body for pods in workload_of(text).pod_sets for _, body in pods.all_containers]


def expand_as_kubelet(text, variables):
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


@pytest.mark.parametrize(("kind", "case"), ALL_CASES)
def test_rendered_jobs_equal_the_recorded_ones(kind, case, golden):
    golden(f"launch_templates/{kind}-{case}", render_case(kind, case))


@pytest.mark.parametrize(("kind", "case"), every_third_fast([row for row in sorted(ALL_CASES) if row[0] in MANIFESTS]))
def test_manifests_have_no_findings_and_satisfy_the_schemas_of_kubernetes_validate(kind, case):
    text = render_case(kind, case)
    assert lint_texts([("-", text)]) == []
    for document in yaml.safe_load_all(text):
        if document["apiVersion"] in ("v1", "batch/v1", "networking.k8s.io/v1"):
            kubernetes_validate.validate(document, "1.37", strict=True)
    for pods in workload_of(text).all_pod_sets if kind not in NO_MSRUN else ():
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pods.template}, "1.37", strict=True)


def test_every_field_is_taken_by_a_kind():
    assert {one.name for kind in KINDS for one in load_kind(kind).settings} == settings_of_spec().keys()


@pytest.mark.parametrize("kind", FEW_FIRST)
def test_a_field_that_a_kind_lists_changes_what_it_renders(kind):
    """Nothing that is set is dropped in silence."""
    more = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "shm_size": "1Gi", "cpu": "2", "master_port": 9000, "cluster_time_out": 7, "grace_s": 77, "ttl_s": 777,
        "user_id": 7, "network_policy": False, "max_restarts": 3, "rank_table": True, "device_resource": "a.b/c",
        "restart_on": "75", "no_restart_on": "75", "spares": 1,
        "resource_claims": {"gpu": "one-gpu"}, "min_nodes": 1, "runtime": "shared",
        "script": ["other.py"], "name": "other", "image": "other:1",
    }  # fmt: skip
    base = {
        **fitting(kind, {**MINIMAL, "device_target": "GPU", "resources": {"accelerators": "A:1"}}),
        "script": ["train.py"],
    }
    takes_restarts = any(one.name == "max_restarts" for one in load_kind(kind).settings)
    for setting in load_kind(kind).settings:
        if setting.name not in ("device_target", "log_dir"):
            own = {"max_restarts": 1} if takes_restarts and setting.name not in ("max_restarts", "runtime") else {}
            before = render_manifest(kind, {**base, **own})
            values = {**base, **own, setting.name: more.get(setting.name, FULL.get(setting.name))}
            assert render_manifest(kind, values) != before, setting.name


WITHOUT_SPARES = {
    "pytorchjob": "its operator ends the job with the first pod that fails",
    "mpijob": "mpirun ends all hosts with the first that is lost",
    "leaderworkerset": "any pod that ends starts the whole group again",
    "rayjob": "its entrypoint ends with the first node that is lost",
    "compose": "a job of the kind compose has no place for it",
}
OF_A_TABLE = {"spares": 1, "max_restarts": 1, "rank_table": True, "device_target": "Ascend"}
REFUSED = [
    ("mpijob", {"max_restarts": 3}, r"max_restarts=3: must be left out: .*mpijob.*; remove it, or .*jobset"),
    ("ascendjob", {}, "device_target='CPU': must be Ascend with ascendjob"),
    ("compose", {"device_target": "Ascend"}, "must be CPU or GPU with compose"),
    ("slurm", {"device_target": "Ascend"}, "must be CPU or GPU with slurm"),
    ("slurm", {"spares": 1}, "spares=1: must be 0 with max_restarts=0"),
    ("volcano", OF_A_TABLE, "must be 0 with rank_table=true, because the table names the hosts"),
    *(
        (kind, {"spares": 1}, f"spares=1: must be left out: {why}; remove it, or choose indexed-job, jobset")
        for kind, why in WITHOUT_SPARES.items()
    ),
    *(("slurm", {"sbatch": {key: "x"}}, "sbatch") for key in ("account x", "-A", "", "a\nb")),
    ("slurm", {"sbatch": {"account": "x\n#SBATCH --uid=0"}}, "sbatch"),
    ("jobset", {"restart_on": "75"}, r"restart_on='75': must be left out with max_restarts=0"),
    (
        "jobset",
        {"max_restarts": 1, "restart_on": "75", "no_restart_on": "75"},
        r"no_restart_on=75: must be another status",
    ),
    ("jobset", {"no_restart_on": "256"}, r"no_restart_on='256': must be a list of exit statuses from 1 to 255"),
    ("jobset", {"no_restart_on": "BANG"}, r"no_restart_on='BANG': must be a list of exit statuses"),
]


@pytest.mark.parametrize(("kind", "values", "words"), REFUSED)
def test_what_a_kind_cannot_have_is_refused_with_the_reason(kind, values, words):
    with pytest.raises(BadValue, match=words):
        render(kind, {**({"name": "t"} if kind == "slurm" else MINIMAL), **values})


def test_a_default_is_taken_by_kinds_that_have_no_place_for_another_value():
    assert render("mpijob", {**MINIMAL, "max_restarts": 0})


# Hostile text


HOSTILE = [
    "a" * 100 + "!", "a: b", "- x", "${name}", "$(JOB_COMPLETION_INDEX)", "$$(A)", "$$", "$", "${", "$HOME", '"', "'",
    "\\", "#", " ", "", "\n---\nkind: Secret\n", "\t", "\r\n", "\x85", "\u2028", "\ufeff", "\x7f", "\x1b[0m", "é中😀",
    "2024-01-01", "null", "~", "y", "No", "on", "1e3", "0o17", "0x1f", "1:30", "1_000", ".inf", ".5", "=", "<<", "*a",
    "&a", "{}", "[]", "!!python/object:os.system", "|", ">", "%", "@", "`",
]  # fmt: skip
process_text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=30)
hostile_text = st.one_of(st.sampled_from(HOSTILE), process_text, st.text("$(){}AB:- \n\"'#", max_size=12))
ARGUMENTS_BEFORE_SCRIPT = 8
PLAIN = [kind for kind in MANIFESTS if kind not in ("mpijob", "ascendjob", *NO_MSRUN)]


@pytest.mark.parametrize("template", one_fast(*PLAIN))
@settings(max_examples=10, deadline=None)
@given(arguments=st.lists(hostile_text, max_size=5), value=hostile_text)
def test_script_and_variables_get_their_words_byte_for_byte(template, arguments, value):
    script = ["train.py", *arguments]
    for container in containers_of(render(template, {**MINIMAL, "env": {"SETTING": value}}, script=script)):
        [setting] = [item["value"] for item in container["env"] if item["name"] == "SETTING"]
        assert type(setting) is str and expand_as_kubelet(setting, {"A": "wrong"}) == value
        assert all(type(argument) is str for argument in container["args"])
        written = container["args"][ARGUMENTS_BEFORE_SCRIPT:]
        variables = {"JOB_COMPLETION_INDEX": "7", "A": "wrong", "name": "wrong", "HOME": "wrong"}
        assert [expand_as_kubelet(argument, variables) for argument in written] == script
        unharmed = [argument for argument in script if "$(" not in argument and "$$" not in argument]
        assert [argument for argument in written if "$$" not in argument] == unharmed


@pytest.mark.parametrize("kind", FEW_FIRST)
@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(sorted(settings_of_spec().keys() - {"script", "runtime"})), value=hostile_text)
def test_hostile_settings_are_refused_on_one_line_or_change_no_structure(kind, name, value):
    given_value = {"KEY": value} if settings_of_spec()[name].value_type.type_name == "table" else value
    try:
        rendered = render(kind, {**fitting(kind, MINIMAL), name: given_value})
    except LaunchTemplateError as error:
        assert "\n" not in str(error)
        return
    assert shape_of(rendered, kind) in (
        shape_of(render(kind, fitting(kind, MINIMAL)), kind),
        shape_of(render(kind, fitting(kind, {**MINIMAL, "network_policy": False})), kind),
    )


def shape_of(text, kind):
    """The objects of a manifest; of a script its lines, but for what they say."""
    if kind in MANIFESTS:
        return [document["kind"] for document in yaml.safe_load_all(text)]
    if kind in ("compose", "skypilot"):
        return [key for key in yaml.safe_load(text) if key != "envs"]
    return [line.partition("=")[0] for line in text.splitlines() if line.startswith("exec")][:1]


@pytest.mark.parametrize("kind", FEW_FIRST)
def test_a_text_of_100_000_characters_comes_through(kind):
    long = "x'\"\n${A}" * 12_500
    rendered = render(kind, fitting(kind, MINIMAL), ["train.py", long])
    if kind in PLAIN:
        assert containers_of(rendered)[0]["args"][-1] == long
    elif kind not in ("compose", "skypilot") and kind in SCRIPTS:
        assert rendered.endswith(f"train.py {shlex.quote(long)}\n")


any_spec = st.fixed_dictionaries(
    {"name": st.text("abc-1", min_size=1, max_size=70), "image": st.sampled_from(["a/b:1", "c@sha256:" + "0" * 64])},
    optional={
        "namespace": st.sampled_from(["ml", "a" * 63]),
        "nodes": st.integers(1, 2000),
        "local_worker_num": st.integers(1, 16),
        "device_target": st.sampled_from(["CPU", "GPU", "Ascend"]),
        "rdma": st.sampled_from(["rdma/a", None]),
        "master_port": st.integers(1024, 65535),
        "cluster_time_out": st.integers(1, 9999),
        "log_dir": st.sampled_from(["/a/b", "/data/logs", None]),
        "rank_table": st.booleans(),
        "max_restarts": st.integers(0, 5),
        "min_nodes": st.none() | st.integers(1, 3),
        "runtime": st.sampled_from([None, "shared"]),
        "resources": st.sampled_from([{}, {"accelerators": "H100:8"}]),
        "spares": st.integers(0, 2),
        "deadline_s": st.none() | st.integers(1, 10**6),
        "grace_s": st.integers(2, 1000),
        "queue": st.sampled_from([None, "team-a"]),
        "priority": st.sampled_from([None, "high"]),
        "network_policy": st.booleans(),
        "service_account": st.sampled_from([None, "sa"]),
        "node_selector": st.dictionaries(st.sampled_from(["a/b", "c"]), st.sampled_from(["", "x"])),
        "tolerations": st.lists(st.just({"operator": "Exists"}), max_size=2),
        "affinity": st.sampled_from([{}, {"nodeAffinity": {}}, {"podAffinity": {}}]),
        "topology": st.sampled_from([None, "a.b/rack"]),
        "env": st.dictionaries(st.sampled_from(["A", "PYTHONUNBUFFERED"]), process_text, max_size=2),
        "secret_env": st.dictionaries(st.sampled_from(["A", "HF_TOKEN"]), st.just("s:k"), max_size=2),
        "claims": st.dictionaries(st.sampled_from(["data", "x.y"]), st.sampled_from(["/data", "/ro:ro"]), max_size=2),
        "resource_claims": st.dictionaries(st.sampled_from(["gpu", "nic"]), st.just("one.gpu"), max_size=2),
        "labels": st.dictionaries(st.sampled_from(["team", "a.b/c"]), st.sampled_from(["", "x"]), max_size=2),
        "annotations": st.dictionaries(st.sampled_from(["n", "a.b/c"]), process_text, max_size=2),
        "pull_policy": st.sampled_from([None, "Always", "never"]),
        "init_containers": st.lists(st.just({"name": "fetch", "image": "a:1"}), max_size=1),
        "sidecars": st.lists(st.just({"name": "side", "image": "a:1"}), max_size=1),
        "restart_on": st.sampled_from(["", "75", "KILL,3"]),
        "no_restart_on": st.sampled_from(["", "4"]),
        "requeue": st.booleans(),
        "sbatch": st.dictionaries(st.sampled_from(["account", "exclusive"]), st.sampled_from(["", "x"]), max_size=2),
        "volumes": st.dictionaries(st.sampled_from(["/v", "/data"]), st.just({"emptyDir": {}}), max_size=2),
    },
)


@pytest.mark.parametrize("kind", FEW_FIRST)
@settings(max_examples=60, deadline=None)
@given(values=any_spec, is_fitted=st.sampled_from([True, True, True, False]))
def test_any_spec_renders_without_a_finding_or_is_refused_on_one_line(kind, values, is_fitted):
    try:
        rendered = render(kind, fitting(kind, values) if is_fitted else values)
    except LaunchTemplateError as error:
        assert "\n" not in str(error) and "; " in str(error)
        return
    if kind in MANIFESTS:
        assert lint_texts([("-", rendered)]) == []
        if kind in NO_MSRUN:
            return
        workload = workload_of(rendered)
        assert len(workload.longest_pod_name) <= 63
        pods = values.get("nodes", 2) + fitting(kind, values).get("spares", 0)
        assert workload.num_pods == pods
    else:
        assert subprocess.run(["bash", "-n"], input=rendered, text=True, check=False).returncode == 0 or kind in (
            "compose",
            "skypilot",
        )


@pytest.mark.parametrize("text", every_third_fast([word for word in HOSTILE if re.fullmatch(r"[\x20-\x7e]*", word)]))
def test_texts_that_some_yaml_parser_could_misread_are_quoted(text):
    rendered = render("jobset", script=["train.py", text])
    [line] = [line.strip() for line in rendered.splitlines() if line.endswith("train.py")]
    following = rendered.split(line + "\n", 1)[1].splitlines()[0].strip()
    assert following.startswith('- "'), following


# Values


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"name": "Train"}, "name"),
        ({"name": "a" * 60}, "name"),
        ({"name": "train\n"}, "name"),
        ({"nodes": 0}, "nodes"),
        ({"nodes": "²"}, "nodes"),
        ({"master_port": 80}, "master_port"),
        ({"device_target": "TPU"}, "device_target"),
        ({"device_resource": "nvidia.com/gpu"}, "device_resource"),
        ({"memory": "32GB"}, "memory"),
        ({"network_policy": "maybe"}, "network_policy"),
        ({"user_id": 0}, "user_id"),
        ({"log_dir": "logs"}, "log_dir"),
        ({"env": {"A": "\0"}}, "env"),
        ({"env": {"JOB_COMPLETION_INDEX": "0"}}, "env"),
        ({"env": {"WANDB_API_KEY": "x"}}, "env.WANDB_API_KEY"),
        ({"env": {"A": "1"}, "secret_env": {"A": "s:k"}}, "env.A"),
        ({"secret_env": {"HF_TOKEN": "no-key"}}, "secret_env"),
        ({"claims": {"a": "/data", "b": "/data:ro"}}, "claims.a"),
        ({"claims": {"a": "/logs:ro"}}, "claims.a"),
        ({"volumes": {"/a": {}}}, "volumes./a"),
        ({"tolerations": "!!python/object:os.system {}"}, "tolerations"),
        ({"affinity": {"podAffinity": {}}, "topology": "rack"}, "topology"),
        ({"script": ["a\0b"]}, "script"),
        ({"script": "train.py"}, "script"),
        ({"script": ["--master-port=1", "train.py"]}, "script"),
    ],
)
def test_wrong_values_are_refused_with_the_name_of_the_placeholder(changes, culprit):
    with pytest.raises(BadValue) as caught:
        render_manifest("jobset", {**MINIMAL, "script": ["train.py"], **changes})
    assert caught.value.name == culprit
    assert "must be" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refused_variables_do_not_show_their_secret():
    with pytest.raises(BadValue, match=r"secret_env\.HF_TOKEN=SECRET:KEY") as caught:
        render("jobset", {**MINIMAL, "env": {"HF_TOKEN": "hf_private"}})
    assert "hf_private" not in str(caught.value)


def test_missing_values_are_named_together():
    with pytest.raises(MissingValue) as caught:
        render_manifest("volcano", {"nodes": 2})
    assert caught.value.names == ("name", "image", "script")


@pytest.mark.parametrize(
    ("target", "resource", "expected"),
    [
        ("CPU", None, {}),
        ("gpu", None, {"nvidia.com/gpu": 4}),
        ("Ascend", None, {"huawei.com/Ascend910": 4}),
        ("Ascend", "huawei.com/npu", {"huawei.com/npu": 4}),
    ],
)
def test_each_worker_gets_one_device(target, resource, expected):
    values = {**MINIMAL, "local_worker_num": "4", "device_target": target, "device_resource": resource}
    for template in PLAIN:
        for container in containers_of(render(template, values)):
            limits = container["resources"]["limits"]
            assert {name: amount for name, amount in limits.items() if "/" in name} == expected
            assert container["resources"]["requests"] == limits


@pytest.mark.parametrize(("restarts", "retries", "action"), [(0, 1, "TerminateJob"), (3, 4, "RestartJob")])
def test_restarts_of_volcano_are_counted_as_its_controller_counts(restarts, retries, action):
    document = yaml.safe_load(render("volcano", {**MINIMAL, "max_restarts": restarts}))
    assert document["spec"]["maxRetry"] == retries, "0 would become the default of 3"
    assert [policy["action"] for policy in document["spec"]["policies"]] == [
        "TerminateJob",
        "TerminateJob",
        action,
        action,
    ]


@pytest.mark.parametrize(("kind", "container"), [("jobset", "msrun"), ("trainjob", "node")])
@pytest.mark.parametrize(
    ("lists", "operator", "statuses"),
    [
        ({}, "In", [2, 93, 126, 127]),
        ({"no_restart_on": "75,TERM"}, "In", [2, 75, 93, 126, 127, 143]),
        ({"restart_on": [75, "KILL"]}, "NotIn", [3, 75, 124, 137]),
    ],
)
def test_jobsets_start_again_after_the_statuses_that_msrun_would(kind, container, lists, operator, statuses):
    text = render(kind, {**MINIMAL, "max_restarts": 1, **lists})
    body = next(one for one in yaml.safe_load_all(text) if one["kind"] in ("JobSet", "TrainingRuntime"))
    spec = body["spec"] if kind == "jobset" else body["spec"]["template"]["spec"]
    *others, rule = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": container, "operator": operator, "values": statuses}
    assert [list(other) for other in others] == [["action", "onPodConditions"]], "evictions come first"
    eviction, final = spec["failurePolicy"]["rules"]
    assert eviction["action"] == "RestartJobSetAndIgnoreMaxRestarts" and final["action"] == "FailJobSet"
    [pattern] = eviction["onJobFailureMessagePatterns"]
    assert re.fullmatch(pattern, "Pod ml/a has condition DisruptionTarget matching FailJob rule at index 0")
    assert not re.fullmatch(pattern, "Container msrun for pod ml/a failed with exit code 2 matching FailJob rule")


@pytest.mark.parametrize("kind", ["run", "compose", "slurm"])
def test_scripts_hand_the_lists_of_statuses_to_msrun(kind):
    text = render(kind, {**MINIMAL, "max_restarts": 1, "restart_on": "75,KILL"})
    assert "--restart_on=75,137" in text and "no_restart_on" not in text

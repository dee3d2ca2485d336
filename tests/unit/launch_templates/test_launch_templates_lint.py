"""The lint: each rule on a manifest that breaks it, unknown keys and options, and what is no manifest at all."""

import copy

import pytest
import yaml
from asked_cases import slow_but
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_templates import BadFile, BadValue, lint_texts, list_kinds, load_kind, render_manifest
from launch_templates.lint import RULES, lint_documents
from launch_templates.lint.documents import Document, read_documents
from launch_templates.msrun_options import FLAGS, NAMES, VALUE_MAY_BE_LEFT_OUT, read_options
from msrun.cli.options import GROUPS, OPTIONAL_VALUES

VALUES = {"name": "train", "image": "r.example/t:1", "nodes": 2, "local_worker_num": 4, "device_target": "GPU"}


MANIFESTS = [kind for kind in list_kinds() if load_kind(kind).is_manifest]


def documents_of(template, **more):
    values = {**VALUES, **({"device_target": "Ascend"} if template == "ascendjob" else {}), **more}
    text = render_manifest(template, values, ["train.py"])
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def lint(documents):
    return lint_documents([Document("f.yaml", body) for body in documents.values()])


def job(documents):
    return documents["Job"]["spec"]


def pod(documents):
    return job(documents)["template"]["spec"]


def box(documents):
    return pod(documents)["containers"][0]


def argument(name, value):
    def change(documents):
        args = box(documents)["args"]
        [position] = [number for number, word in enumerate(args) if word.startswith(f"--{name}=")]
        args[position] = f"--{name}={value}"

    return change


def put(path, value):
    """A change that puts `value` at a dotted path below one of: service, job, pod, box."""

    def change(documents):
        root, *keys = path.split(".")
        starts = {"job": job, "pod": pod, "box": box, "service": lambda found: found["Service"]["spec"]}
        node = documents["Job"] if root == "document" else starts[root](documents)
        for key in keys[:-1]:
            node = node[int(key) if key.isdigit() else key]
        node[keys[-1]] = value

    return change


def drop(path):
    root, key = path.split(".")
    return lambda documents: {"job": job, "pod": pod}[root](documents).pop(key)


def shell(text):
    def change(documents):
        box(documents)["command"] = ["/bin/bash", "-ec", text]
        del box(documents)["args"]

    return change


def variable(item):
    return lambda documents: box(documents)["env"].append(item)


WORDS = "--worker_num 8 --local_worker_num=4 --master_addr train-0.train --master-port=8118"
JOB_FAULTS = [
    (argument("worker_num", "16"), {"world-size"}),
    (lambda documents: box(documents)["args"].insert(0, "--bind_coer=true"), {"msrun-option"}),
    (put("job.completions", 3), {"completions", "world-size"}),
    (argument("master_addr", "127.0.0.1"), {"master-address"}),
    (argument("master_addr", "train-1.train"), {"master-address"}),
    (argument("master_addr", "train-0.train.svc"), set()),
    (argument("master_addr", "train-0.train.ml.svc.cluster.local"), set()),
    (argument("node_rank", "0"), {"node-rank"}),
    (argument("node_rank", "$(VC_TASK_INDEX)"), {"node-rank"}),
    (argument("node_rank", "${JOB_COMPLETION_INDEX}"), set()),
    (variable({"name": "JOB_COMPLETION_INDEX", "value": "0"}), {"rank-variable"}),
    (argument("master_port", "9000"), {"port"}),
    (variable({"name": "MASTER_PORT", "value": "9000"}), {"port"}),
    (lambda documents: box(documents)["args"].remove("--node_rank=$(JOB_COMPLETION_INDEX)"), set()),
    (lambda documents: box(documents)["args"].remove("--local_worker_num=4"), {"msrun-command"}),
    (put("box.command", ["torchrun"]), {"msrun-command"}),
    (lambda documents: documents.pop("Service"), {"headless-service"}),
    (drop("pod.subdomain"), {"headless-service"}),
    (put("service.clusterIP", "10.0.0.1"), {"headless-service"}),
    (put("service.selector", {"app": "train"}), {"headless-service"}),
    (put("service.selector", {"app.kubernetes.io/instance": "train"}), set()),
    (drop("job.completionMode"), {"completion-mode"}),
    (put("pod.restartPolicy", "OnFailure"), {"restart-policy"}),
    (drop("job.backoffLimit"), {"backoff-limit"}),
    (put("job.podFailurePolicy", {"rules": [{"action": "FailJob"}]}), {"pod-failure-policy"}),
    (put("document.metadata", {"name": "Train"}), {"names", "headless-service", "master-address"}),
    (put("box.resources.limits.memory", "32GB"), {"resources"}),
    (put("box.resources.limits", {"cpu": 1, "memory": "9Gi", "nvidia.com/gpu": 2}), {"resources", "device-count"}),
    (put("box.volumeMounts", []), {"shared-memory"}),
    (put("pod.volumes.0.emptyDir", {"medium": "Memory"}), {"shared-memory"}),
    (put("pod.volumes.0.emptyDir", {"medium": "Memory", "sizeLimit": "32Gi"}), {"shared-memory"}),
    (variable({"name": "DEBUG", "value": 1}), {"wrong-type"}),
    (put("pod.terminationGracePeriodSeconds", 60), {"grace"}),
    (put("pod.hostNetwork", value=True), {"host-network", "dns-names"}),
    (put("job.backoffLimt", 3), {"unknown-key"}),
    (drop("job.template"), {"missing-key", "pods", "msrun-command"}),
    (put("pod.containers", []), {"pods", "msrun-command"}),
    (shell(f"cd /code && exec msrun {WORDS} --node_rank $JOB_COMPLETION_INDEX train.py"), set()),
    (shell(f"msrun {WORDS} --node_rank ${{JOB_COMPLETION_INDEX}} train.py"), {"shell"}),
    (shell(f"cd /code; exec msrun {WORDS} --node_rank 1 train.py; echo done"), {"node-rank"}),
    (
        shell(f"set -e\ncd /code  # here\nexec msrun \\\n  {WORDS} \\\n  --node_rank $JOB_COMPLETION_INDEX t.py\n"),
        set(),
    ),
    (shell(f"cd /code\nmsrun {WORDS} --node_rank=$(JOB_COMPLETION_INDEX) t.py"), {"shell"}),
    (shell("exec 'msrun"), {"msrun-command"}),
]


@pytest.mark.parametrize(("change", "rules"), JOB_FAULTS)
def test_each_fault_of_an_indexed_job_is_found_by_its_rules_alone(change, rules):
    documents = documents_of("indexed-job")
    change(documents)
    assert {finding.rule_id for finding in lint(documents)} == rules


def test_an_index_from_the_annotation_and_an_address_from_a_variable_are_understood():
    documents = documents_of("indexed-job")
    path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    variable({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": path}}})(documents)
    variable({"name": "MASTER", "value": "train-0.train"})(documents)
    argument("node_rank", "$(NODE)")(documents)
    argument("master_addr", "$(MASTER)")(documents)
    assert lint(documents) == []


def spec_of(kind, *path, **values):
    def change(documents):
        node = documents[kind]["spec"]
        for key in path:
            node = node[key]
        node.update(values)

    return change


def second(kind, key):
    def change(documents):
        items = documents[kind]["spec"][key]
        items.append({**copy.deepcopy(items[0]), "name": "more"})

    return change


def sub_path(documents):
    """Mount the file of the rank table alone."""
    for role in documents["AscendJob"]["spec"]["replicaSpecs"].values():
        [container] = role["template"]["spec"]["containers"]
        path = "/user/serverid/devindex/config/hccl.json"
        container["args"] = [f"--rank_table_file={path}", "train.py"]
        container["volumeMounts"].append({"name": "logs", "mountPath": path, "subPath": "hccl.json"})


MASTER = ("pytorchReplicaSpecs", "Master")
JOB_OF_SET = ("replicatedJobs", 0, "template", "spec")
OTHER_FAULTS = [
    ("volcano", spec_of("Job", minAvailable=1), {"min-available"}),
    ("volcano", spec_of("Job", plugins={"env": []}), {"volcano-plugins"}),
    ("volcano", spec_of("Job", plugins={"svc": ["--publish-not-ready-addresses=true"]}), {"volcano-plugins"}),
    ("volcano", second("Job", "tasks"), {"index-once", "world-size", "min-available"}),
    ("jobset", spec_of("JobSet", "replicatedJobs", 0, replicas=2), {"index-once", "world-size"}),
    ("jobset", spec_of("JobSet", "network", enableDNSHostnames=False), {"dns-names"}),
    ("jobset", spec_of("JobSet", "failurePolicy", restartStrategy="Never"), {"wrong-value"}),
    ("jobset", spec_of("JobSet", "network", subdomain="other"), {"master-address"}),
    ("jobset", spec_of("JobSet", *JOB_OF_SET, completionMode="NonIndexed"), {"completion-mode"}),
    ("jobset", spec_of("JobSet", *JOB_OF_SET, podReplacementPolicy="TerminatingOrFailed"), {"pod-failure-policy"}),
    ("pytorchjob", spec_of("PyTorchJob", *MASTER, replicas=2), {"replica-types", "world-size"}),
    ("pytorchjob", spec_of("PyTorchJob", *MASTER, restartPolicy="OnFailure"), {"restart-policy"}),
    ("pytorchjob", spec_of("PyTorchJob", "runPolicy", backoffLimit=3), {"backoff-limit"}),
    ("pytorchjob", lambda documents: documents["PyTorchJob"]["metadata"].update(name="other"), {"master-address"}),
    ("trainjob", lambda documents: documents.pop("TrainingRuntime"), {"pods"}),
    ("trainjob", spec_of("TrainJob", "trainer", numNodes=3), {"world-size"}),
    (
        "ascendjob",
        spec_of("AscendJob", "replicaSpecs", "Master", replicas=2),
        {"replica-types", "world-size", "min-available"},
    ),
    ("ascendjob", spec_of("AscendJob", "replicaSpecs", "Worker", restartPolicy="ExitCode"), {"restart-policy"}),
    ("ascendjob", spec_of("AscendJob", "runPolicy", "schedulingPolicy", minAvailable=1), {"min-available"}),
    ("ascendjob", lambda documents: documents.pop("Service"), {"headless-service"}),
    ("mpijob", spec_of("MPIJob", "mpiReplicaSpecs", "Worker", replicas=3), {"world-size"}),
    ("mpijob", spec_of("MPIJob", "mpiReplicaSpecs", "Launcher", replicas=2), {"replica-types"}),
    ("ascendjob", sub_path, {"rank-table-mount"}),
]


@pytest.mark.parametrize(("template", "change", "rules"), OTHER_FAULTS)
def test_each_fault_of_other_kinds_is_found_by_its_rules_alone(template, change, rules):
    documents = documents_of(template)
    change(documents)
    assert {finding.rule_id for finding in lint(documents)} == rules


def test_a_job_and_its_service_may_stand_in_two_files():
    documents = documents_of("indexed-job")
    service = ("service.yaml", yaml.safe_dump(documents.pop("Service")))
    rest = ("job.yaml", yaml.safe_dump_all(documents.values()))
    assert [finding.rule_id for finding in lint_texts([rest])] == ["headless-service"]
    assert lint_texts([rest, service]) == []


def test_the_items_of_a_list_are_checked_too():
    documents = documents_of("indexed-job")
    put("pod.hostNetwork", value=True)(documents)
    text = yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": list(documents.values())})
    assert {finding.rule_id for finding in lint_texts([("list.yaml", text)])} == {"host-network", "dns-names"}


def test_all_findings_come_in_one_run_with_path_message_and_remedy():
    documents = documents_of("indexed-job")
    argument("worker_num", "16")(documents)
    put("pod.restartPolicy", "Always")(documents)
    findings = lint(documents)
    pod_path = "spec.template.spec"
    places = [("world-size", f"{pod_path}.containers[0].args"), ("restart-policy", f"{pod_path}.restartPolicy")]
    assert [(finding.rule_id, finding.path) for finding in findings] == places
    for finding in findings:
        assert str(finding).startswith(f"f.yaml: Job/train {finding.path}: error {finding.rule_id}: ")
        assert finding.message
        assert finding.remedy


def test_rule_names_are_unique_and_every_rule_is_tested():
    names = [rule.rule_id for rule in RULES]
    tested = {name for *_, rules in JOB_FAULTS for name in rules} | {
        name for *_, rules in OTHER_FAULTS for name in rules
    }
    assert len(set(names)) == len(names)
    assert set(names) == tested | {"not-read", "no-job", "no-schemas", "extra-task"}


def test_files_without_a_job_get_one_warning():
    [finding] = lint_texts([("config.yaml", "kind: ConfigMap\nmetadata: {name: a}\n")])
    assert (finding.rule_id, finding.severity) == ("no-job", "warning")
    assert "ConfigMap/a" in finding.message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\na: 2\n", "key 'a' is twice"),
        ("- a\n", "not a mapping"),
        ("!!python/object:os.system {}", "not YAML"),
        ("[" * 5000, "line 1: more than 100 levels deep; write it flatter"),
        ("? [a]\n: 1\n", "not YAML"),
        ("&a {kind: List, items: [*a]}", r"line 1: \*a contains itself; write it out"),
    ],
)
def test_text_that_is_no_manifest_is_refused_on_one_line(text, problem):
    with pytest.raises(BadFile, match=problem) as caught:
        read_documents(text, "bad.yaml")
    assert "\n" not in str(caught.value)


def paths_of(node, path=()):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(below for key, value in items for below in paths_of(value, (*path, key)))]


junk = st.sampled_from(
    [None, True, 0, -1, 1.5, "", "x", "$(A)", [], [None], {}, {"x": None}, [[]], {1: 2}, ["--x"], "9" * 30]
)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), template=st.sampled_from(MANIFESTS))
def test_no_damage_to_a_manifest_makes_the_lint_raise(data, template):
    bodies = list(documents_of(template).values())
    for _ in range(data.draw(st.integers(1, 3))):
        places = [place for place in paths_of(bodies) if len(place) > 1]
        *route, last = data.draw(st.sampled_from(places))
        node = bodies
        for key in route:
            node = node[key]
        node[last] = copy.deepcopy(data.draw(junk))
    for finding in lint_documents([Document("f.yaml", body) for body in bodies]):
        assert str(finding)


OF_GPUS = [kind for kind in list_kinds() if load_kind(kind).is_manifest and kind != "ascendjob"]


def text_of(template, *script):
    return render_manifest(template, VALUES, script or ("train.py",))


def unknown(text):
    return [finding for finding in lint_texts([("f.yaml", text)]) if finding.rule_id == "unknown-key"]


@pytest.mark.parametrize("template", slow_but(("jobset",), OF_GPUS))
@pytest.mark.parametrize(
    ("key", "wrong"),
    [("restartPolicy", "restartPolcy"), ("containers", "container"), ("limits", "limit"), ("metadata", "metadta")],
)
def test_a_misspelt_key_is_named_with_the_one_that_is_meant(template, key, wrong):
    findings = unknown(text_of(template).replace(f"{key}:", f"{wrong}:"))
    assert findings
    for finding in findings:
        assert finding.severity == "error"
        assert f"{wrong!r} is no key of" in finding.message
        assert finding.remedy == f"did you mean {key!r}?"


def test_keys_that_the_user_chooses_are_left_alone():
    body = yaml.safe_load(text_of("indexed-job").split("---")[-1])
    body["metadata"]["annotations"] = {"anything": "goes"}
    body["spec"]["template"]["spec"]["nodeSelector"] = {"zone": "a"}
    assert unknown(yaml.safe_dump(body)) == []
    assert unknown("apiVersion: example.com/v1\nkind: Other\nanything: [{goes: 1}]\n") == []


def test_options_are_those_of_the_command():
    options = {option.opts[0].removeprefix("--") for group in GROUPS.values() for option in group}
    options = {name for name in options if not name.startswith("-")}
    assert options | FLAGS == NAMES
    assert {name.removeprefix("--") for name in OPTIONAL_VALUES} == VALUE_MAY_BE_LEFT_OUT


def test_options_end_where_msrun_lets_them_end():
    line = read_options(["--worker-num", "4", "--join", "--grace=2", "x.py", "--node_rank", "0"])
    assert line.options == {"worker_num": "4", "join": "", "grace": "2"}
    assert line.words == {"worker_num": "--worker-num", "join": "--join", "grace": "--grace"}
    assert line.rest == ["x.py", "--node_rank", "0"]
    assert read_options(["--", "--join", "x.py"]).rest == ["--", "--join", "x.py"]
    assert read_options(["--worker_num"]).options == {"worker_num": ""}


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (("--bind_core", "true", "--node_rank", "0", "x.py"), "write --bind_core=true"),
        (("--bind_core=true", "--node-rank", "0", "x.py"), "without --node_rank, which the manifest gives itself"),
        (("--bind_coer=true", "x.py"), "did you mean --bind_core?"),
        (("--zzz", "x.py"), "see msrun --help"),
    ],
)
def test_options_before_the_script_are_read_as_msrun_reads_them(script, match):
    with pytest.raises(BadValue, match=match.replace("?", r"\?")):
        text_of("jobset", *script)
    assert "--bind_core=true" in text_of("jobset", "--bind_core=true", "--grace", "5", "x.py")


def test_lint_names_an_option_that_msrun_does_not_have():
    text = text_of("jobset").replace("--node_rank=", "--node-rnk=")
    [finding] = [one for one in lint_texts([("f.yaml", text)]) if one.rule_id == "msrun-option"]
    assert (finding.message, finding.remedy) == ("--node-rnk is no option of msrun", "did you mean --node_rank?")


@pytest.mark.parametrize("kind", ["RayCluster", "TFJob"])
def test_job_of_a_kind_that_is_not_checked_is_told_by_name(kind):
    text = f"apiVersion: x/v1\nkind: {kind}\nmetadata: {{name: a}}\n"
    [finding] = lint_texts([("f.yaml", text)])
    assert (finding.rule_id, finding.severity, finding.message) == ("not-read", "warning", f"a {kind} is not checked")
    ids = {one.rule_id for one in lint_texts([("f.yaml", f"{text_of('jobset')}---\n{text}")])}
    assert ids == {"not-read"}

"""What goes over a rendered manifest: patches, the Helm chart and the kustomize base, and the lint after it."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cluster_pods import DOMAIN, pods_of

import launch_templates
from launch_templates import BadFile, lint_texts, render_manifest
from launch_templates.cli import main
from launch_templates.lint.documents import read_documents
from msrun.planning.host_options import find_host_options
from msrun.planning.schedulers import HostView, find_surroundings

VALUES = {"name": "train", "image": "r.example/t:1"}


def patched(patch, kind="indexed-job"):
    text = render_manifest(kind, VALUES, ["train.py"], read_documents(patch, "patch.yaml"))
    return {body["kind"]: body for body in yaml.safe_load_all(text)}


def pod(bodies):
    return bodies["Job"]["spec"]["template"]["spec"]


def test_mappings_merge_null_deletes_and_items_merge_by_name():
    before = pod(patched(""))
    after = pod(
        patched("""
kind: Job
spec:
  template:
    spec:
      hostNetwork: true
      enableServiceLinks: null
      containers:
        - name: msrun
          imagePullPolicy: Always
          env:
            - {name: PYTHONUNBUFFERED, $patch: delete}
            - {name: NEW, value: "1", valueFrom: null}
          volumeMounts:
            - {mountPath: /logs, subPath: a}
        - {name: side, image: "s:1"}
""")
    )
    assert after["hostNetwork"] is True and "enableServiceLinks" not in after
    main_container, side = after["containers"]
    assert side == {"name": "side", "image": "s:1"}
    assert main_container["imagePullPolicy"] == "Always"
    assert main_container["env"] == [{"name": "NEW", "value": "1"}]
    assert [mount["mountPath"] for mount in main_container["volumeMounts"]] == ["/dev/shm", "/logs"]
    assert main_container["volumeMounts"][1] == {"name": "logs", "mountPath": "/logs", "subPath": "a"}
    changed = {"env", "volumeMounts", "imagePullPolicy"}
    assert all(main_container[key] == value for key, value in before["containers"][0].items() if key not in changed)


def test_lists_without_names_are_replaced():
    bodies = patched("kind: NetworkPolicy\nspec: {policyTypes: [Egress]}\n---\nkind: Job\nspec: {suspend: true}\n")
    assert bodies["NetworkPolicy"]["spec"]["policyTypes"] == ["Egress"]
    assert bodies["Job"]["spec"]["suspend"] is True


@pytest.mark.parametrize(
    ("patch", "kind"),
    [("kind: Deployment", "indexed-job"), ("kind: Job\nmetadata: {name: other}", "indexed-job"), ("{}", "jobset")],
)
def test_patch_that_fits_no_object_is_refused_with_those_that_there_are(patch, kind):
    with pytest.raises(BadFile, match=r"patch.yaml: a patch of .* fits 0 .*give kind .* of one of: .*/train"):
        patched(patch, kind)


def test_patch_that_no_manifest_can_hold_is_refused():
    with pytest.raises(BadFile, match="holds what is no Kubernetes YAML"):
        patched("kind: Job\nspec: {suspend: 2024-01-01}")


def test_parts_that_a_patch_removes_do_not_trouble_the_next_one():
    with pytest.raises(BadFile, match="fits 0"):
        patched("kind: Job\nmetadata: null\n---\nkind: Job\nmetadata: {name: train}\n")


def test_scripts_take_no_patch():
    with pytest.raises(BadFile, match="a slurm is no manifest"):
        patched("kind: Job", "slurm")


def test_what_a_patch_breaks_the_lint_finds(capsys, tmp_path):
    patch = tmp_path / "patch.yaml"
    patch.write_text("kind: Job\nspec: {backoffLimt: 3, completions: 5}\n")
    words = ["--set", "name=train", "--set", "image=t:1", "--patch", str(patch), "--", "train.py"]
    with pytest.raises(SystemExit) as ended:
        main(["render", "indexed-job", *words])
    said = capsys.readouterr()
    assert ended.value.code == 1
    assert "error unknown-key" in said.err and "error completions" in said.err
    assert "completions: 5" in said.out


FOLDER = Path(launch_templates.__file__).parent
SCRIPT = ["train.py", "--lr", "0.1", "$(X) $$", "{}: é"]
OVERLAY = """
resources: [base]
namePrefix: big-
images: [{name: msrun, newName: registry.example/train, newTag: "1.0"}]
patches:
  - target: {kind: JobSet}
    patch: |-
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/completions, value: 4}
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/parallelism, value: 4}
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/template/spec/containers/0/env/0/value, value: "8"}
      - {op: replace, path: /spec/replicatedJobs/0/template/spec/template/spec/containers/0/env/1/value, value: "2"}
"""
SETTINGS = [
    {"image": "r.example/t:1"},
    {
        "image": "r.example/t:1", "nodes": 3, "local_worker_num": 4, "device_resource": "nvidia.com/gpu",
        "max_restarts": 2, "grace_s": 77, "queue": "team-a", "labels": {"team": "x"}, "annotations": {"a.b/c": "d"},
        "env": {"A": "1", "B": "x y"}, "node_selector": {"p": "h"}, "tolerations": [{"operator": "Exists"}],
        "pull_secret": "reg", "service_account": "sa", "priority": "high", "pull_policy": "Always",
        "init_containers": [{"name": "f", "image": "f:1"}],
    },
]  # fmt: skip


def run(*words):
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm; python3 .ci/install_helm.py FOLDER")
@pytest.mark.parametrize("values", SETTINGS, ids=["minimal", "full"])
def test_chart_renders_the_objects_that_the_kind_renders(values, tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({**values, "script": SCRIPT}))
    made = run("helm", "template", "train", FOLDER / "charts" / "msrun-jobset", "-n", "ml", "-f", path)
    device = {"device_target": "GPU"} if "device_resource" in values else {}
    expected = render_manifest("jobset", {**values, **device, "name": "train", "namespace": "ml"}, SCRIPT)
    assert list(yaml.safe_load_all(made)) == list(yaml.safe_load_all(expected))


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm; python3 .ci/install_helm.py FOLDER")
def test_chart_refuses_a_value_that_it_does_not_have():
    words = ["helm", "template", "train", str(FOLDER / "charts" / "msrun-jobset"), "--set", "image=a,script={t.py}"]
    done = subprocess.run([*words, "--set", "nodez=4"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode and "nodez" in done.stderr


def test_base_has_the_pod_of_the_kind_and_passes_the_lint():
    base = (FOLDER / "kustomize" / "jobset" / "jobset.yaml").read_text()
    assert lint_texts([("base", base)]) == []
    values = {"name": "msrun", "image": "msrun", "local_worker_num": 1, "network_policy": False}
    own, expected = yaml.safe_load(base), yaml.safe_load(render_manifest("jobset", values, ["train.py"]))
    for body in (own, expected):
        body["spec"]["network"].pop("subdomain", None)
        [container] = body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        del container["args"], container["env"]
    assert own == expected


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl; python3 .ci/install_helm.py FOLDER")
def test_overlay_of_the_base_gives_pods_that_find_each_other(tmp_path):
    shutil.copytree(FOLDER / "kustomize" / "jobset", tmp_path / "base")
    (tmp_path / "kustomization.yaml").write_text(OVERLAY)
    made = run("kubectl", "kustomize", tmp_path)
    assert lint_texts([("made", made)]) == []
    body = yaml.safe_load(made)
    body["spec"]["network"]["subdomain"] = "big-msrun"  # JobSet's own default: its name
    pods = pods_of(yaml.safe_dump(body))
    assert len(pods) == 4 and pods[0].container["image"] == "registry.example/train:1.0"
    for rank, pod in enumerate(pods):
        job = find_surroundings(pod.environ, HostView(pod.name, f"{pod.subdomain}.{DOMAIN}"))
        assert job is not None
        numbers = {name: int(pod.args[name]) for name in ("worker_num", "local_worker_num")}
        options = {"node_rank": -1, "master_addr": "127.0.0.1", "master_port": 0, **numbers}
        found = find_host_options(job, options, set(numbers), lambda: 0).options
        assert (found["node_rank"], numbers["worker_num"]) == (rank, 8)
        assert found["master_addr"] == f"big-msrun-node-0-0.big-msrun.{DOMAIN}"

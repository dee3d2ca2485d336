"""The Helm chart and the kustomize base, as helm and kubectl render them, are the job that launch-template renders."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_pods import DOMAIN, pods_of

import launch_templates
from launch_templates import lint_texts, render_manifest
from msrun.planning.discovery.host_options import find_host_options
from msrun.planning.discovery.schedulers import find_surroundings
from msrun.planning.discovery.surroundings import HostView

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
SETTINGS: list[dict[str, Any]] = [
    {"image": "r.example/t:1"},
    {
        "image": "r.example/t:1", "nodes": 3, "local_worker_num": 4, "device_resource": "nvidia.com/gpu",
        "max_restarts": 2, "grace_s": 77, "queue": "team-a", "labels": {"team": "x"}, "annotations": {"a.b/c": "d"},
        "env": {"A": "1", "B": "x y"}, "node_selector": {"p": "h"}, "tolerations": [{"operator": "Exists"}],
        "pull_secret": "reg", "service_account": "sa", "priority": "high", "pull_policy": "Always",
        "init_containers": [{"name": "f", "image": "f:1"}],
    },
]  # fmt: skip


def run(*words: str | Path) -> str:
    return subprocess.run([*map(str, words)], capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm; python3 .ci/install_helm.py FOLDER")
@pytest.mark.parametrize("values", SETTINGS, ids=["minimal", "full"])
def test_chart_renders_the_objects_that_the_kind_renders(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({**values, "script": SCRIPT}))
    made = run("helm", "template", "train", FOLDER / "charts" / "msrun-jobset", "-n", "ml", "-f", path)
    device = {"device_target": "GPU"} if "device_resource" in values else {}
    expected = render_manifest("jobset", {**values, **device, "name": "train", "namespace": "ml"}, SCRIPT)
    assert list(yaml.safe_load_all(made)) == list(yaml.safe_load_all(expected))


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm; python3 .ci/install_helm.py FOLDER")
def test_chart_refuses_a_value_that_it_does_not_have() -> None:
    words = ["helm", "template", "train", str(FOLDER / "charts" / "msrun-jobset"), "--set", "image=a,script={t.py}"]
    done = subprocess.run([*words, "--set", "nodez=4"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode and "nodez" in done.stderr


def test_base_has_the_pod_of_the_kind_and_passes_the_lint() -> None:
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
def test_overlay_of_the_base_gives_pods_that_find_each_other(tmp_path: Path) -> None:
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

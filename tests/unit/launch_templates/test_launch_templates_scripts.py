"""Batch scripts, shell scripts and compose files: run by a shell, they start msrun with the words that were given.
Manifests as the documentation of the operators shows them, right and broken, are judged as their controllers do."""

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from asked_cases import one_fast
from commands import command_path
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_runner import JobRunner

from launch_templates import BadValue, lint_texts, render_manifest

VALUES = {"name": "train", "image": "r.example/t:1"}
RECORD = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('SETTING')]))"
word = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)


def started(script, folder, *args):
    """What msrun, or srun, is started with when a shell runs the script."""
    for name in ("msrun", "srun"):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(RECORD)} "$@"\n')
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    env = {"PBS_O_WORKDIR": str(folder), "PATH": f"{folder}:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"}
    done = subprocess.run(["bash", "job.sh", *args], cwd=folder, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    words, setting = json.loads(done.stdout)
    return words, setting


@pytest.mark.parametrize("kind", one_fast("slurm", "pbs", "lsf", "run", "run-cluster"))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(word, max_size=3), setting=word)
def test_script_and_variables_come_through_the_shell_byte_for_byte(kind, arguments, setting, tmp_path):
    own = {} if kind.startswith("run") else {"name": "train"}
    text = render_manifest(kind, {**own, "env": {"SETTING": setting}}, ["train.py", *arguments])
    words, found = started(text, tmp_path, "10.0.0.1", "3")
    assert words[words.index("train.py") :] == ["train.py", *arguments]
    assert found == setting
    if kind == "run-cluster":
        assert words[:3] == ["--master_addr=10.0.0.1", "--node_rank=3", "--worker_num=16"]


def test_run_cluster_without_its_arguments_says_how_it_is_used(tmp_path):
    (tmp_path / "job.sh").write_text(render_manifest("run-cluster", {}, ["train.py"]))
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode and "usage: run_cluster.sh MASTER_ADDR NODE_RANK" in done.stderr


def test_directives_of_slurm_come_before_the_first_command():
    values = {"name": "t", "device_target": "GPU", "cpu": "2500m", "memory": "1Gi", "queue": "gpu",
              "priority": "high", "deadline_s": 3661, "env": {"A": "\n#SBATCH --uid=0\n"}}  # fmt: skip
    text = render_manifest("slurm", values, ["train.py"])
    directives = text.partition("export A=")[0].splitlines()[3:]
    assert directives == [
        "#SBATCH --job-name=t", "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --cpus-per-task=3",
        "#SBATCH --mem=1024M", "#SBATCH --gpus-per-node=8", "#SBATCH --partition=gpu", "#SBATCH --qos=high",
        "#SBATCH --time=61:01", "#SBATCH --signal=TERM@120", "#SBATCH --no-requeue",
    ]  # fmt: skip


def test_spares_of_slurm_are_more_nodes_for_one_msrun_that_outlives_them(tmp_path):
    values = {"name": "t", "spares": 1, "max_restarts": 2, "deadline_s": 600, "env": {"SETTING": "a b"}}
    text = render_manifest("slurm", values, ["train.py"])
    for line in ("--nodes=3", "--no-kill", "--signal=B:TERM@120"):
        assert f"#SBATCH {line}\n" in text
    words, setting = started(text.replace("exec", "export SLURM_JOB_NODELIST=n[1-3]\nexec", 1), tmp_path)
    assert words[0] == "--hosts=n[1-3]" and {"--spares=1", "--max_restarts=2", "--env=SETTING"} < {*words}
    assert setting == "a b"


def test_compose_starts_every_host_with_its_rank_and_escapes_dollars():
    values = {**VALUES, "nodes": 3, "device_target": "GPU", "env": {"A": "${B}"}, "claims": {"data": "/data:ro"}}
    body = yaml.safe_load(render_manifest("compose", values, ["train.py", "$HOME"]))
    assert list(body["services"]) == ["node0", "node1", "node2"]
    for rank, service in enumerate(body["services"].values()):
        assert f"--node_rank={rank}" in service["command"] and "--master_addr=node0" in service["command"]
        assert service["command"][-2:] == ["train.py", "$$HOME"]
        assert service["environment"]["A"] == "$${B}"
        assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 8
        assert service["volumes"] == ["data:/data:ro"]
    assert body["volumes"] == {"data": {"external": True}}


def test_any_line_of_slurm_goes_over_that_of_the_kind():
    more = {"sbatch": {"account": "ml", "mem": "0", "exclusive": ""}, "srun": {"container-image": "a b"}}
    text = render_manifest("slurm", {"name": "t", **more}, ["train.py"])
    assert "#SBATCH --mem=0\n" in text and "#SBATCH --account=ml\n" in text and "#SBATCH --exclusive\n" in text
    assert "32768M" not in text and " '--container-image=a b' msrun " in text


@pytest.mark.parametrize(
    ("kind", "variable", "own", "line"),
    [
        ("pbs", "PBS_NODEFILE", {"qsub": {"A": "ml"}}, "#PBS -A ml"),
        ("lsf", "LSB_DJOB_HOSTFILE", {"bsub": {"P": "ml"}}, "#BSUB -P ml"),
    ],
)
def test_scripts_of_pbs_and_lsf_plan_a_job_on_the_hosts_of_their_file(kind, variable, own, line, tmp_path):
    values = {"name": "t", "nodes": 2, "local_worker_num": 4, "spares": 1, "max_restarts": 1, "deadline_s": 3661}
    text = render_manifest(kind, {**values, **own}, ["train.py"])
    assert line in text.splitlines() and ("walltime=01:01:01" in text or "#BSUB -W 62" in text)
    (tmp_path / "hosts").write_text("h1\nh2\nh3\n")
    (tmp_path / "train.py").touch()
    path = command_path(tmp_path, {"msrun": "-m msrun --dry_run=json"}, "/usr/bin:/bin")
    with JobRunner() as runner:
        env = runner.environ({"PATH": path, variable: str(tmp_path / "hosts"), "PBS_O_WORKDIR": str(tmp_path)})
        (tmp_path / "job.sh").write_text(text)
        done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 8 and [len(host["workers"]) for host in plan["hosts"]][:2] == [4, 4]


def test_task_of_skypilot_starts_msrun_on_each_machine():
    values = {
        **VALUES,
        "nodes": 3,
        "device_target": "GPU",
        "resources": {"accelerators": "H100:8"},
        "env": {"A": "b c"},
    }
    body = yaml.safe_load(render_manifest("skypilot", values, ["train.py", "a b"]))
    assert (body["num_nodes"], body["envs"], body["resources"]["accelerators"]) == (3, {"A": "b c"}, "H100:8")
    assert shlex.split(body["run"])[:2] == ["exec", "msrun"] and shlex.split(body["run"])[-2:] == ["train.py", "a b"]
    with pytest.raises(BadValue, match="accelerators: H100:8"):
        render_manifest("skypilot", {**VALUES, "device_target": "GPU"}, ["train.py"])


FAKE_RAY = """
import sys, types
def get(found): return [get(one) for one in found] if isinstance(found, list) else found
def ready(): return None
group = types.SimpleNamespace(ready=ready)
def placement_group(bundles, strategy):
    assert strategy == "STRICT_SPREAD" and bundles == [{"CPU": 8}] * 2, bundles
    return group
def remote(**amounts):
    return lambda task: types.SimpleNamespace(
        options=lambda scheduling_strategy: types.SimpleNamespace(remote=task)
    )
ray = types.ModuleType("ray")
ray.init, ray.get, ray.remote = (lambda: None), get, remote
ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
groups = types.ModuleType("ray.util.placement_group"); groups.placement_group = placement_group
strategies = types.ModuleType("ray.util.scheduling_strategies")
strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: placement_group_bundle_index
sys.modules.update({"ray": ray, "ray.util": types.ModuleType("ray.util"), groups.__name__: groups,
                    strategies.__name__: strategies})
"""
"""As much of Ray as the entrypoint calls, on this host."""


def test_entrypoint_of_a_rayjob_starts_msrun_on_each_node_and_ends_with_its_status(tmp_path):
    text = render_manifest("rayjob", {**VALUES, "local_worker_num": 4}, ["train.py", "a b"])
    entrypoint = next(body for body in yaml.safe_load_all(text) if body["kind"] == "RayJob")["spec"]["entrypoint"]
    (tmp_path / "sitecustomize.py").write_text(FAKE_RAY)
    (tmp_path / "msrun").write_text('#!/bin/sh\nprintf "%s|" "$@"; echo\n[ "$1" = --node_rank=0 ] || exit 9\n')
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for name in ("msrun", "python"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    done = subprocess.run(["sh", "-c", entrypoint], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9, done.stderr
    lines = [line.split("|") for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [
        [f"--node_rank={rank}", "--master_addr=10.0.0.7", "--worker_num=8"] for rank in range(2)
    ]
    assert all(line[-3:] == ["train.py", "a b", ""] for line in lines)


STYLE = ("shared-memory",)
"""What documents leave out for brevity."""

# volcano-sh/volcano: the guide of the plugin pytorch, with msrun in place of the script
VOLCANO = """
apiVersion: batch.volcano.sh/v1alpha1
kind: Job
metadata: {name: pytorch-job}
spec:
  minAvailable: 1
  schedulerName: volcano
  plugins:
    pytorch: ["--master=master", "--worker=worker", "--port=23456"]
  tasks:
    - replicas: 1
      name: master
      policies: [{event: TaskCompleted, action: CompleteJob}]
      template:
        spec:
          containers: [{image: "r.example/t:1", name: master, command: [msrun, train.py]}]
          restartPolicy: Never
    - replicas: 2
      name: worker
      template:
        spec:
          containers: [{image: "r.example/t:1", name: worker, command: [msrun, train.py]}]
          restartPolicy: Never
"""
# kubeflow/training-operator: its example elastic/imagenet, shortened
ELASTIC = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: elastic}
spec:
  elasticPolicy: {rdzvBackend: c10d, minReplicas: 1, maxReplicas: 2, maxRestarts: 100}
  runPolicy: {backoffLimit: 0}
  pytorchReplicaSpecs:
    Worker:
      replicas: 2
      restartPolicy: Never
      template:
        spec:
          containers:
            - name: pytorch
              image: r.example/t:1
              command: [msrun, --local_worker_num=1, train.py]
"""
# kubeflow/trainer: docs, a job of the runtime torch-distributed
TRAIN_JOB = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: pytorch-simple, namespace: kubeflow}
spec:
  trainer:
    numNodes: 2
    image: r.example/t:1
    command: [msrun, train.py]
  runtimeRef: {name: torch-distributed}
"""
# kubernetes-sigs/lws: the sample of its first page
GROUPS = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: sample}
spec:
  replicas: 1
  leaderWorkerTemplate:
    size: 4
    workerTemplate:
      spec:
        containers:
          - {name: msrun, image: "r.example/t:1", command: [msrun, --local_worker_num=8, train.py]}
"""
# kubernetes-sigs/jobset: a driver beside the workers
DRIVER = """
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: train}
spec:
  replicatedJobs:
    - name: driver
      template:
        spec:
          template:
            spec: {restartPolicy: Never, containers: [{name: d, image: "r.example/d:1", command: [python, d.py]}]}
    - name: node
      template:
        spec:
          completions: 2
          parallelism: 2
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              containers:
                - name: msrun
                  image: r.example/t:1
                  command: [msrun, --worker_num=4, --local_worker_num=2, --master_addr=train-node-0-0.train, train.py]
"""
# kubeflow/training-operator: its example simple, of one pod, which may restart alone
SINGLE = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: pytorch-simple}
spec:
  nprocPerNode: "4"
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template: {spec: {containers: [{name: pytorch, image: "r.example/t:1", command: [msrun, train.py]}]}}
"""
# kubernetes-sigs/jobset: its webhook names the rules; defaults of the definition are filled in
DEFAULTS = DRIVER.replace(
    "spec:\n  replicated", "spec:\n  failurePolicy: {rules: [{action: FailJobSet}]}\n  replicated", 1
)
RIGHT = {
    "defaults": DEFAULTS,
    "single": SINGLE,
    "elastic": ELASTIC,
    "train job": TRAIN_JOB,
    "groups": GROUPS,
    "driver": DRIVER,
}


def rules(text):
    return {finding.rule_id for finding in lint_texts([("f.yaml", text)], STYLE)}


def test_job_that_does_not_run_msrun_gets_a_warning_alone():
    pod = '{restartPolicy: OnFailure, containers: [{name: a, image: "b:1", command: [tar, xf, a.tar]}]}'
    text = "{apiVersion: batch/v1, kind: Job, metadata: {name: unpack}, spec: {template: {spec: %s}}}"
    assert rules(text % pod) == {"msrun-command"}


@pytest.mark.parametrize("name", RIGHT)
def test_right_manifests_have_no_finding(name):
    assert rules(RIGHT[name]) == set()


def test_volcanos_plugin_pytorch_is_understood_with_its_two_tasks():
    assert rules(VOLCANO) == {"min-available"}, "one of three pods may start alone"
    assert rules(VOLCANO.replace("minAvailable: 1", "minAvailable: 3")) == set()


BROKEN = [
    (VOLCANO, lambda spec: spec["tasks"].append({**copy.deepcopy(spec["tasks"][1]), "name": "extras"}), {"extra-task"}),
    (VOLCANO, lambda spec: spec["tasks"][0].update(replicas=2), {"replica-types", "min-available"}),
    (VOLCANO, lambda spec: spec["tasks"][0].update(name="chief"), {"replica-types", "extra-task"}),
    (VOLCANO, lambda spec: spec.update(plugins={"env": [], "ssh": []}), {"index-once", "volcano-plugins"}),
    (VOLCANO, lambda spec: box(spec["tasks"][1])["command"].insert(1, "--master_port=29500"), {"port"}),
    (VOLCANO, lambda spec: box(spec["tasks"][1])["command"].insert(1, "--node_rank=$(VC_TASK_INDEX)"), {"node-rank"}),
    (ELASTIC, lambda spec: spec["elasticPolicy"].update(maxReplicas="2"), {"wrong-type"}),
    (ELASTIC, lambda spec: spec.pop("elasticPolicy"), {"replica-types"}),
    (SINGLE, lambda spec: role(spec).update(replicas=2), {"replica-types", "restart-policy", "backoff-limit"}),
    (SINGLE, lambda spec: role(spec)["template"]["spec"]["containers"][0].update(name="main"), {"replica-types"}),
    (ELASTIC, lambda spec: spec["pytorchReplicaSpecs"]["Worker"].pop("restartPolicy"), {"restart-policy"}),
    (TRAIN_JOB, lambda spec: spec["trainer"]["command"].insert(1, "--node_rank=0"), {"node-rank"}),
    (TRAIN_JOB, lambda spec: spec["runtimeRef"].update(kind="TrainingRuntime"), {"pods"}),
    (TRAIN_JOB, lambda spec: spec["runtimeRef"].pop("name"), {"missing-key"}),
    (GROUPS, lambda spec: group(spec)["command"].insert(1, "--node_rank=$(JOB_COMPLETION_INDEX)"), {"node-rank"}),
    (GROUPS, lambda spec: group(spec)["command"].insert(1, "--worker_num=16"), {"world-size"}),
    (GROUPS, lambda spec: spec["leaderWorkerTemplate"].update(restartPolicy="Never"), {"wrong-value"}),
    (DRIVER, lambda spec: spec["replicatedJobs"][1].update(replicas=2), {"index-once", "world-size"}),
    (DRIVER, lambda spec: spec.update(failurePolicy={"maxRestart": 3}), {"unknown-key"}),
]  # fmt: skip


def box(task):
    [container] = task["template"]["spec"]["containers"]
    return container


def role(spec):
    return spec["pytorchReplicaSpecs"]["Master"]


def group(spec):
    [container] = spec["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(("text", "change", "expected"), BROKEN)
def test_broken_manifests_are_found_by_their_rules_alone(text, change, expected):
    body = yaml.safe_load(text.replace("minAvailable: 1", "minAvailable: 3"))
    change(body["spec"])
    assert rules(yaml.safe_dump(body)) == expected

"""Manifests as the documentation of the operators shows them, right and broken, are judged as their controllers do."""

import copy

import pytest
import yaml

from launch_templates import lint_texts

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

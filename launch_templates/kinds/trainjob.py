"""trainjob: Kubeflow TrainJob with its TrainingRuntime (trainer.kubeflow.org/v1alpha1); the whole job starts again

Ranks: the trainer makes a JobSet of the runtime, with numNodes pods, and puts a pod's index into PET_NODE_RANK; it is
the node rank of that pod's msrun. Pod 0 is known as NAME-node-0-0.NAME before it is ready.
The trainer wants the replicated job and its container to be called node.
Restarts: a pod that fails fails its Job, and JobSet starts all pods again, max_restarts times. No restart repairs exit
code 2 of msrun, wrong input, 126 and 127, a program that cannot be run, and 93, with which a worker says so: the pod
failure policy then fails the JobSet at once, and after what no_restart_on and restart_on say.
"""

from __future__ import annotations

from launch_templates import pod
from launch_templates.kinds import jobset
from launch_templates.kinds.indexed_job import pod_count
from launch_templates.spec import JobSpec

TAKES = jobset.TAKES
_API = "trainer.kubeflow.org/v1alpha1"


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the NetworkPolicy, the runtime and the TrainJob."""
    args = pod.pod_args(spec, master_addr=f"{spec.name}-node-0-0.{spec.name}", node_rank="$(PET_NODE_RANK)")
    template = pod.pod_template(spec, args, container="node")
    job = {
        "name": "node",
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {**pod_count(spec), **jobset.failure_rules(spec, "node"), "template": template},
        },
    }
    runtime = {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": pod.metadata(spec),
        "spec": {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            "template": {"spec": jobset.set_spec(spec, job)},
        },
    }
    train_job = {
        "apiVersion": _API,
        "kind": "TrainJob",
        "metadata": pod.metadata(spec, labels=pod.kueue_label(spec)),
        "spec": pod.lean(
            runtimeRef={"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name},
            activeDeadlineSeconds=spec.deadline_s,
            trainer={"numNodes": spec.nodes, "numProcPerNode": spec.local_worker_num},
        ),
    }
    return [*pod.network_policy(spec), runtime, train_job]

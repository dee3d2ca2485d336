"""pytorchjob: Kubeflow PyTorchJob (kubeflow.org/v1, training-operator 1.9); for clusters that run that operator

Ranks: the operator puts the pod's index over both replica types into PET_NODE_RANK: the master is 0, workers follow.
It makes one Service for each pod; the master is known as NAME-master-0. Its WORLD_SIZE and RANK count pods, not
workers; msrun gives every worker the true ones. The operator wants the container to be called pytorch and the port
pytorchjob-port.
A pod that fails fails the job, and the pods that still run are removed (cleanPodPolicy Running). The operator can
only start single pods again, which cannot join a job whose peers have stopped: for restarts use jobset or volcano.
With min_nodes the job is elastic: it has workers alone, msrun of worker 0 is known as NAME-worker-0, and the job begins
with min_nodes or more hosts when no others have come for 30 s. Then their number stays.
"""

from launch_templates import pod
from launch_templates.spec import JobSpec

TAKES = (*pod.POD_FIELDS, "deadline_s", "min_nodes")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the NetworkPolicy and the PyTorchJob."""
    args = pod.pod_args(spec, f"{spec.name}-master-0", "$(PET_NODE_RANK)")
    elastic = {}
    if spec.min_nodes:  # msrun finds hosts and master in the operator's PET_NNODES=MIN:MAX and PET_RDZV_ENDPOINT
        args = [word for word in args if not word.startswith(("--worker_num", "--master", "--node_rank"))]
        port = {"rdzvBackend": "c10d", "rdzvPort": spec.master_port}
        elastic = {"minReplicas": spec.min_nodes, "maxReplicas": spec.nodes, **port}
    # the operator itself sets PYTHONUNBUFFERED
    template = pod.pod_template(spec, args, container="pytorch", port_name="pytorchjob-port", env=pod.user_env(spec))
    body = pod.lean(
        elasticPolicy=elastic,
        runPolicy=run_policy(spec),
        pytorchReplicaSpecs={"Worker": role(spec.nodes, template)} if elastic else roles(spec, template, template),
    )
    job = pod.own_object(spec, "kubeflow.org/v1", "PyTorchJob", body, labels=pod.kueue_label(spec))
    return [*pod.network_policy(spec), job]


def run_policy(spec: JobSpec) -> pod.Body:
    """Return the policy of operators of Kubeflow's kind: one failed pod ends the job, and the others with it."""
    limits = {"activeDeadlineSeconds": spec.deadline_s, "ttlSecondsAfterFinished": spec.ttl_s}
    return pod.lean(cleanPodPolicy="Running", backoffLimit=0, **limits)


def role(replicas: int, template: pod.Body) -> pod.Body:
    """Return a replica type."""
    return {"replicas": replicas, "restartPolicy": "Never", "template": template}


def roles(spec: JobSpec, master: pod.Body, worker: pod.Body) -> pod.Body:
    """Return one master, and workers for the other nodes."""
    return {"Master": role(1, master), **({"Worker": role(spec.nodes - 1, worker)} if spec.nodes > 1 else {})}

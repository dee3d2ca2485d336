"""leaderworkerset: LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), one group; for a program that serves or never ends

Ranks: the index in LWS_WORKER_INDEX is the node rank of a pod's msrun; the leader, pod 0, is known as NAME-0.NAME.
Restarts: a pod that ends, also with success, starts the whole group again, as often as it happens: a program that
trains has to continue from its checkpoint, and to stay when it is done. For jobs with an end use jobset.
"""

from launch_templates import pod
from launch_templates.spec import JobSpec

TAKES = tuple(name for name in pod.POD_FIELDS if name != "ttl_s")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the NetworkPolicy and the LeaderWorkerSet."""
    args = pod.pod_args(spec, f"{spec.name}-0.{spec.name}", "$(LWS_WORKER_INDEX)")
    group = {
        "size": spec.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",
        "workerTemplate": pod.pod_template(spec, args, restartPolicy="Always"),
    }
    body = {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": group}
    api, labels = "leaderworkerset.x-k8s.io/v1", pod.kueue_label(spec)
    return [*pod.network_policy(spec), pod.own_object(spec, api, "LeaderWorkerSet", body, labels=labels)]

"""rayjob: RayJob (ray.io/v1) of KubeRay, with a cluster of its own; one msrun on each of its worker nodes

Ranks: the entrypoint, `python -m launch_templates.kinds.rayjob`, asks Ray for one place on each of as many nodes, and
starts there msrun with its node rank and the address of the first node. The image needs Ray, Python, msrun and the
script. The head has no workers. Ray's own submission passes the words of the script through a shell: `$` is not safe.
Restarts: a failed job starts again on a new cluster, max_restarts times.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from math import ceil

from launch_templates import pod
from launch_templates.names import escape_references
from launch_templates.spec import JobSpec
from launch_templates.values import parse_quantity

# no NetworkPolicy: KubeRay's own pods, which it would keep out, talk to the head
TAKES = (*(name for name in pod.POD_FIELDS if name != "network_policy"), "max_restarts", "deadline_s")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the RayJob."""
    gpus = spec.local_worker_num if spec.device_target == "GPU" else 0
    start = ["python", "-m", "launch_templates.kinds.rayjob", str(spec.nodes), str(ceil(parse_quantity(spec.cpu)))]
    words = [*start, str(gpus), *pod.msrun_options(pod.in_container(spec)), *spec.script]
    head = pod.pod_template(spec, [], container="ray-head", command=[], amounts={"cpu": "1", "memory": spec.memory})
    worker = pod.pod_template(spec, [], container="ray-worker", command=[])
    counts = dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), spec.nodes)
    cluster = {
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": head},
        "workerGroupSpecs": [{"groupName": "node", **counts, "rayStartParams": {}, "template": worker}],
    }
    body = pod.lean(
        entrypoint=escape_references(shlex.join(words)),
        backoffLimit=spec.max_restarts,
        shutdownAfterJobFinishes=True,
        ttlSecondsAfterFinished=spec.ttl_s,
        activeDeadlineSeconds=spec.deadline_s,
        rayClusterSpec=cluster,
    )
    return [pod.own_object(spec, "ray.io/v1", "RayJob", body, labels=pod.kueue_label(spec))]


def main(words: Sequence[str]) -> int:
    """Start msrun on NODES nodes of the Ray cluster around this process: NODES CPUS GPUS, then the words of msrun.

    Returns:
        Status of the first msrun in order that did not end with 0.
    """
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes, cpus, gpus = map(int, words[:3])

    def start(node_rank: int, master_addr: str) -> int | str:
        """Start msrun here; without the address of the first node return that of this one."""
        if not master_addr:
            return str(ray.util.get_node_ip_address())
        place = [f"--node_rank={node_rank}", f"--master_addr={master_addr}"]
        return subprocess.run(["msrun", *place, *words[3:]], check=False).returncode

    ray.init()
    group = placement_group([{"CPU": cpus, **({"GPU": gpus} if gpus else {})}] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    task = ray.remote(num_cpus=cpus, num_gpus=gpus)(start)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank) for rank in range(nodes)]
    hosts = [task.options(scheduling_strategy=place) for place in places]
    master_addr = ray.get(hosts[0].remote(0, ""))
    statuses = ray.get([host.remote(rank, master_addr) for rank, host in enumerate(hosts)])
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Kinds of Kubeflow Trainer 2: a TrainJob with a runtime of its own or of the cluster, and that runtime. Pure."""

from launch_templates import pod
from launch_templates.errors import BadValue
from launch_templates.kinds import jobset
from launch_templates.spec import JobSpec, settings_of_spec

JOB_TAKES = (*jobset.TAKES, "runtime")
_OF_JOB = ("script", "namespace", "nodes", "spares", "network_policy", "queue", "topology", "cluster_time_out",
           "deadline_s", "env", "secret_env", "log_dir")  # fmt: skip
RUNTIME_TAKES = tuple(name for name in jobset.TAKES if name not in _OF_JOB)
_OF_RUNTIME = ("shm_size", "user_id", "service_account", "pull_secret", "pull_policy", "node_selector", "tolerations",
               "affinity", "topology", "annotations", "claims", "volumes", "resource_claims", "init_containers",
               "sidecars", "priority", "ttl_s", "spares", *pod.RESTART_FIELDS)  # fmt: skip
_API = "trainer.kubeflow.org/v1alpha1"


def build_job(spec: JobSpec) -> list[pod.Body]:
    """trainjob: TrainJob with its TrainingRuntime (trainer.kubeflow.org/v1alpha1); the whole job starts again

    Ranks: the trainer makes a JobSet of the runtime, with numNodes pods, and puts a pod's index into PET_NODE_RANK: the
    node rank of that pod's msrun. Pod 0 is known as NAME-node-0-0.NAME before it is ready.
    The trainer wants the replicated job and its container to be called node.
    With runtime=R the job is made of the ClusterTrainingRuntime R, which the kind clustertrainingruntime renders once.
    Restarts and spares: as with jobset; they are those of the runtime.
    """
    args = pod.pod_args(spec, f"{spec.name}-node-0-0.{spec.name}", "$(PET_NODE_RANK)")
    trainer: pod.Body = {"numNodes": spec.nodes + spec.spares, "numProcPerNode": spec.local_worker_num}
    runtimes, policies = [_runtime("TrainingRuntime", spec, args)], pod.network_policy(spec)
    if spec.runtime:
        for name in _OF_RUNTIME:
            if getattr(spec, name) != settings_of_spec()[name].default:
                remedy = f"render it into {spec.runtime}, or leave out runtime"
                raise BadValue(name, getattr(spec, name), f"left out with runtime={spec.runtime}, whose it is", remedy)
        amounts = {"requests": pod.resources(spec), "limits": pod.resources(spec)}
        own = {"image": spec.image, "command": ["msrun"], "args": args, "env": pod.user_env(spec)}
        trainer |= pod.lean(**own, resourcesPerNode=amounts)
        runtimes, policies = [], pod.network_policy(spec, {"jobset.sigs.k8s.io/jobset-name": spec.name})
    kind = "ClusterTrainingRuntime" if spec.runtime else "TrainingRuntime"
    body = pod.lean(
        runtimeRef={"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": spec.runtime or spec.name},
        activeDeadlineSeconds=spec.deadline_s,
        trainer=trainer,
    )
    return [*policies, *runtimes, pod.own_object(spec, _API, "TrainJob", body, labels=pod.kueue_label(spec))]


def build_runtime(spec: JobSpec) -> list[pod.Body]:
    """clustertrainingruntime: runtime of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1) for many TrainJobs

    Ranks: of a TrainJob with runtime=NAME; this has what all jobs share: restarts, volumes, where pods may run. Image,
    script, number of nodes and amounts are those of the job.
    """
    return [_runtime("ClusterTrainingRuntime", spec, [])]


def _runtime(kind: str, spec: JobSpec, args: list[str]) -> pod.Body:
    template = pod.pod_template(spec, args, container="node")
    step = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    job = {"metadata": step, "spec": jobset.job_spec(spec, template, "node")}
    policy = {"numNodes": spec.nodes + spec.spares, "torch": {}}
    body = {"mlPolicy": policy, "template": {"spec": jobset.set_spec(spec, job)}}
    return pod.own_object(spec, _API, kind, body, labels={"trainer.kubeflow.org/framework": "torch"})

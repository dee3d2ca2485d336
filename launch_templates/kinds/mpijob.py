"""mpijob: Kubeflow MPIJob (kubeflow.org/v2beta1, mpi-operator 0.5 or newer); mpirun starts one msrun in each pod

Ranks: msrun takes its node rank from Open MPI's variables; worker pod 0 is known as NAME-worker-0.NAME.
The image needs Open MPI, and an SSH server as mpi-operator's own images have it: for the user, with the configuration
/home/mpiuser/.sshd_config and keys in /home/mpiuser/.ssh.
Variables of env and secret_env are set in the launcher, and mpirun hands them to all hosts.
A pod that fails fails the job: mpirun ends, and the launcher is not started again.
"""

from launch_templates import pod
from launch_templates.kinds.pytorchjob import role, run_policy
from launch_templates.spec import JobSpec

TAKES = (*pod.POD_FIELDS, "deadline_s")


def build(spec: JobSpec) -> list[pod.Body]:
    """Return the NetworkPolicy and the MPIJob."""
    exported = [word for name in ("PATH", "PYTHONUNBUFFERED", *spec.env, *spec.secret_env) for word in ("-x", name)]
    words = ["-np", str(spec.nodes), "--map-by", "ppr:1:node", "--bind-to", "none", *exported, "msrun"]
    launcher = pod.pod_template(
        spec,
        [*words, *pod.pod_args(spec, f"{spec.name}-worker-0.{spec.name}")],
        container="mpi",
        command=["mpirun"],
        amounts={"cpu": "1", "memory": spec.memory},
    )
    server = ["-De", "-f", "/home/mpiuser/.sshd_config"]
    worker = pod.pod_template(spec, server, container="mpi", command=["/usr/sbin/sshd"], env=[])
    body = {
        "slotsPerWorker": 1,
        "mpiImplementation": "OpenMPI",
        "sshAuthMountPath": "/home/mpiuser/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": run_policy(spec),
        "mpiReplicaSpecs": {"Launcher": role(1, launcher), "Worker": role(spec.nodes, worker)},
    }
    job = pod.own_object(spec, "kubeflow.org/v2beta1", "MPIJob", body, labels=pod.kueue_label(spec))
    return [*pod.network_policy(spec), job]

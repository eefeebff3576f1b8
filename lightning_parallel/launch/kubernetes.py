"""Manifests for Kubernetes: a JobSet, or the jobs of Kubeflow's two operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import yaml
from typing_extensions import override

from lightning_parallel.launch.job import Job
from lightning_parallel.launch.pods import GRACE, Pods, pod_name_violations, variables
from lightning_parallel.launch.torchrun import SHUTDOWN

_PORT = 29500
_NODE = "node"
_RANDOM = "-xxxxx"
"""The part that Kubernetes puts behind the name of a pod."""
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RUNTIME = "torch-distributed"
_PATIENCE = [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": SHUTDOWN}]


def manifest(job: Job, pods: Pods, kind: str, *, runtime: str | None = None) -> str:
    """The manifest, as YAML.

    Args:
        job: What to run.
        pods: In what to run it.
        kind: ``"jobset"``, ``"trainjob"`` or ``"pytorchjob"``.
        runtime: The runtime of a TrainJob.

    Returns:
        One document, for ``kubectl apply -f``.
    """
    given = trainjob(job, pods, runtime or _RUNTIME) if kind == "trainjob" else KINDS[kind](job, pods)
    text = yaml.dump(given, Dumper=_Plain, sort_keys=False, width=120)
    return f"# {job.title}; submit it with kubectl apply -f.\n{text}"


class _Plain(yaml.SafeDumper):
    """Writes what occurs twice twice: people read and edit manifests."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        return True


def jobset(job: Job, pods: Pods) -> dict[str, Any]:
    """A JobSet: one pod a node, in which the first rank starts the others. They meet by the name of node 0 in DNS.

    Args:
        job: What to run.
        pods: In what to run it.
    """
    # The controller makes a headless service of the subdomain's name.
    environment = [
        {"name": "MASTER_ADDR", "value": f"{job.name}-{_NODE}-0-0.{job.name}"},
        {"name": "MASTER_PORT", "value": str(_PORT)},
        {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
    ]
    ports = [{"name": "rendezvous", "containerPort": _PORT}]
    pod = {
        "restartPolicy": "Never",
        **pods.spec(job, _NODE, _escaped(job.command.line), ports=ports, env=environment),
    }
    indexed = {"completionMode": "Indexed", "completions": job.nodes, "parallelism": job.nodes}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pods.metadata(job.name),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": job.name},
            # A pod that fails ends its Job, and with it all ranks: those of other nodes would wait for it.
            "failurePolicy": {"maxRestarts": job.max_restarts},
            "replicatedJobs": [
                {
                    "name": _NODE,
                    "replicas": 1,
                    "template": {"spec": {**indexed, "backoffLimit": 0, "template": {"spec": pod}}},
                }
            ],
        },
    }


def pytorchjob(job: Job, pods: Pods) -> dict[str, Any]:
    """A PyTorchJob: the operator tells torchrun of each pod where node 0 is, and which node it is on.

    Args:
        job: What to run.
        pods: In what to run it.
    """
    ports = [{"name": "pytorchjob-port", "containerPort": _PORT}]
    spec = pods.spec(job, "pytorch", _torchrun(job), ports=ports, env=_PATIENCE)
    restart = "OnFailure" if job.max_restarts else "Never"
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": pods.metadata(job.name),
        "spec": {
            "nprocPerNode": str(job.ranks),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.max_restarts},
            "pytorchReplicaSpecs": {
                name: {"replicas": number, "restartPolicy": restart, "template": {"spec": spec}}
                for name, number in replicas.items()
                if number
            },
        },
    }


def trainjob(job: Job, pods: Pods, runtime: str = _RUNTIME) -> dict[str, Any]:
    """A TrainJob: the runtime tells torchrun of each pod where node 0 is, and which node it is on.

    Args:
        job: What to run.
        pods: In what to run it.
        runtime: The name of a ClusterTrainingRuntime for torch, whose Job and container are called ``node``.
    """
    patched = {
        "terminationGracePeriodSeconds": GRACE,
        "containers": [{"name": _NODE, "volumeMounts": pods.mounts}],
        "volumes": pods.volumes,
    }
    replicated = {"name": _NODE, "template": {"spec": {"template": {"spec": patched}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pods.metadata(job.name),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": runtime},
            "trainer": {
                "image": pods.image,
                "command": _torchrun(job),
                "env": [*_PATIENCE, *variables(job)],
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks,
                "resourcesPerNode": pods.resources(job),
            },
            "runtimePatches": [
                {
                    "manager": "lightning-parallel",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
                }
            ],
        },
    }


def _torchrun(job: Job) -> list[str]:
    """Start the ranks of a pod; the operator's variables (``PET_...``) say where node 0 is, and which one this is."""
    shape = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks}"]
    return ["torchrun", *shape, "--no-python", *_escaped(job.command.line)]


def _escaped(words: Iterable[str]) -> list[str]:
    """Words in which Kubernetes finds no variables to put in."""
    return [word.replace("$(", "$$(") for word in words]


def kind_violations(kind: str, job_name: str, nodes: int, *, runtime: str | None, max_restarts: int) -> list[str]:
    """Reasons that lie in the kind of object; empty if there are none.

    Args:
        kind: As given.
        job_name: The name of the object.
        nodes: The number of machines.
        runtime: As given; a TrainJob alone has one.
        max_restarts: As given.
    """
    if kind not in KINDS:
        return [f"--kind={kind} is unknown; possible: {', '.join(KINDS)}"]
    if kind == "pytorchjob":
        longest = "-master-0" if nodes == 1 else f"-worker-{nodes - 2}"
    else:
        longest = f"-{_NODE}-0-{nodes - 1}{_RANDOM}"
    found = pod_name_violations(job_name, longest)
    if runtime is not None and kind != "trainjob":
        found.append(f"--runtime={runtime} is for --kind=trainjob; leave it out")
    if kind == "trainjob" and max_restarts:
        found.append(
            f"--max-restarts={max_restarts}: the runtime of a TrainJob says how often it is started again; leave "
            "it out, or give --kind=jobset"
        )
    return found


KINDS: dict[str, Callable[[Job, Pods], dict[str, Any]]] = {
    "jobset": jobset,
    "trainjob": trainjob,
    "pytorchjob": pytorchjob,
}
"""Kind -> what builds its object."""

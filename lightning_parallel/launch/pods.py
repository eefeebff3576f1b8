"""Pods that hold the ranks of a node: the container, its GPUs, shared memory, and the volume for checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_parallel.launch.job import Job

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST = 63
"""Characters of a name in DNS."""
_SUBDOMAIN = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_QUANTITY = re.compile(r"[1-9][0-9]*(Mi|Gi|Ti|M|G|T)")
_RESOURCE = re.compile(r"([a-z0-9][-.a-z0-9]*/)?[A-Za-z0-9]([-._A-Za-z0-9]*[A-Za-z0-9])?")
_SHARED, _CHECKPOINTS = "shared-memory", "checkpoints"
GRACE = 120
"""Seconds between SIGTERM and the end of a pod, in which a fit ends its step and saves."""


@dataclass(frozen=True)
class Pods:
    """Where and in what ranks run.

    Args:
        image: The image, with the package, the recipe and what they need.
        namespace: The namespace; ``None`` for that of the submitter.
        claim: A PersistentVolumeClaim for checkpoints.
        mount: Where its volume is seen.
        gpu: The resource that counts GPUs.
        shared_memory: The most that ``/dev/shm`` may hold; ``None`` for what the node and the limits of the pod give.
    """

    image: str
    namespace: str | None = None
    claim: str | None = None
    mount: str = "/checkpoints"
    gpu: str = "nvidia.com/gpu"
    shared_memory: str | None = None

    def violations(self) -> list[str]:
        """Reasons why Kubernetes would not take them; empty if it may."""
        return [
            *_image_violations(self.image),
            *_matching("namespace", self.namespace, _LABEL, "a DNS label, such as training"),
            *_matching("volume", self.claim, _SUBDOMAIN, "the name of a PersistentVolumeClaim, such as checkpoints"),
            *_matching("mount", self.mount, re.compile(r"/[^:]+"), "an absolute path, such as /checkpoints"),
            *_matching("gpu-resource", self.gpu, _RESOURCE, "the name of a resource, such as nvidia.com/gpu"),
            *_matching("shared-memory", self.shared_memory, _QUANTITY, "an amount, such as 16Gi"),
        ]

    def metadata(self, name: str) -> dict[str, Any]:
        """The metadata of an object called `name`."""
        return {"name": name, **({"namespace": self.namespace} if self.namespace else {})}

    @property
    def volumes(self) -> list[dict[str, Any]]:
        """Shared memory, without which workers of a loader and NCCL have 64 MiB, and the volume for checkpoints."""
        size = {"sizeLimit": self.shared_memory} if self.shared_memory else {}
        found: list[dict[str, Any]] = [{"name": _SHARED, "emptyDir": {"medium": "Memory", **size}}]
        if self.claim:
            found.append({"name": _CHECKPOINTS, "persistentVolumeClaim": {"claimName": self.claim}})
        return found

    @property
    def mounts(self) -> list[dict[str, Any]]:
        """Where a container sees the volumes."""
        found = [{"name": _SHARED, "mountPath": "/dev/shm"}]
        return [*found, {"name": _CHECKPOINTS, "mountPath": self.mount}] if self.claim else found

    def resources(self, job: Job) -> dict[str, Any]:
        """The GPUs and cores of a node."""
        limits = {"limits": {self.gpu: str(job.ranks)}} if job.has_gpus else {}
        requests = {} if job.cpus is None else {"requests": {"cpu": str(job.cpus * job.ranks)}}
        return {**limits, **requests}

    def spec(self, job: Job, name: str, command: Sequence[str], **container: Any) -> dict[str, Any]:
        """The specification of a pod.

        Args:
            job: What to run.
            name: The container's name.
            command: What it runs.
            container: More fields of the container; ``env`` stands before the job's own variables.
        """
        own = {
            "name": name,
            "image": self.image,
            "command": list(command),
            **container,
            "env": [*container.get("env", ()), *variables(job)],
            "resources": self.resources(job),
            "volumeMounts": self.mounts,
        }
        return {"terminationGracePeriodSeconds": GRACE, "containers": [own], "volumes": self.volumes}


def variables(job: Job) -> list[dict[str, Any]]:
    """The job's variables, as a container has them."""
    return [{"name": name, "value": value} for name, value in job.variables.items()]


def pod_name_violations(name: str, longest: str) -> list[str]:
    """Reasons why objects and their pods cannot be called `name`; empty if they can.

    Args:
        name: As given.
        longest: What follows it in the longest name that is made of it.
    """
    if not _LABEL.fullmatch(name):
        return [f"--name={name!r} is no DNS label; give lower-case letters, digits and -, with a letter first"]
    if len(name) + len(longest) > _MOST:
        return [
            f"--name={name} has {len(name)} characters, and {longest} follows it in names of pods, which may have "
            f"{_MOST}; give at most {_MOST - len(longest)}"
        ]
    return []


def _image_violations(image: str) -> Iterable[str]:
    if not image:
        yield "--image is missing: pods need an image with lightning_parallel and the recipe; give its name"
    elif re.search(r"\s", image):
        yield f"--image={image!r} is no name of an image; give one such as registry/name:tag"


def _matching(option: str, value: str | None, pattern: re.Pattern[str], wanted: str) -> Iterable[str]:
    if value is not None and not pattern.fullmatch(value):
        yield f"--{option}={value!r} is not what Kubernetes takes; give {wanted}"

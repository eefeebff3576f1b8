"""Manifests against the schemas of the operators, and what they ask for."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from lightning_parallel.launch.command import Command
from lightning_parallel.launch.job import Job
from lightning_parallel.launch.kubernetes import KINDS, jobset, kind_violations, manifest
from lightning_parallel.launch.pods import Pods
from tests.launch.schema import schema_errors

COMMAND = Command(("fit", "--config", "r.yaml", "--model.text=$(HOME)"))
PODS = Pods("registry/train:1", namespace="team", claim="claim", shared_memory="16Gi")


def job(**options: Any) -> Job:
    given = {"nodes": 3, "ranks": 8, "cpus": 4, "environment": {"A": "b c"}, "max_restarts": 2, **options}
    return Job("lm", command=COMMAND, **given)


def found(given: Any, name: str) -> list[Any]:
    """All values of fields of this name."""
    if isinstance(given, list):
        return [value for each in given for value in found(each, name)]
    if not isinstance(given, dict):
        return []
    return [value for key, each in given.items() for value in ([each] if key == name else found(each, name))]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_is_valid_and_has_everything(kind: str, nodes: int) -> None:
    text = manifest(job(nodes=nodes), PODS, kind)
    given = yaml.safe_load(text)
    assert schema_errors(given, kind) == []
    assert "&id" not in text
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in found(given, "volumes")[
        0
    ]
    assert {"name": "checkpoints", "mountPath": "/checkpoints"} in found(given, "volumeMounts")[0]
    assert found(given, "claimName")[0] == "claim"
    assert set(found(given, "image")) == {"registry/train:1"}
    assert found(given, "limits")[0] == {"nvidia.com/gpu": "8"}
    assert {"name": "OMP_NUM_THREADS", "value": "4"} in found(given, "env")[0]
    assert {"name": "A", "value": "b c"} in found(given, "env")[0]
    # Kubernetes makes $(HOME) of it, which is what was given, where one dollar would be the variable of the container.
    assert found(given, "command")[0][-1] == "--model.text=$$(HOME)"


def test_the_nodes_of_a_jobset_meet_by_name() -> None:
    spec = jobset(job(), PODS)["spec"]
    (replicated,) = spec["replicatedJobs"]
    of_job = replicated["template"]["spec"]
    (container,) = of_job["template"]["spec"]["containers"]
    variables = {each["name"]: each for each in container["env"]}
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, as the controller has it.
    assert variables["MASTER_ADDR"]["value"] == f"lm-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    assert "job-completion-index" in variables["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert (of_job["completionMode"], of_job["completions"], of_job["parallelism"]) == ("Indexed", 3, 3)
    assert (of_job["backoffLimit"], of_job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert spec["failurePolicy"] == {"maxRestarts": 2}


def test_a_pytorchjob_has_one_master() -> None:
    specs = yaml.safe_load(manifest(job(), PODS, "pytorchjob"))["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in specs.items()} == {"Master": 1, "Worker": 2}
    assert {each["restartPolicy"] for each in specs.values()} == {"OnFailure"}


def test_no_gpus_are_asked_for_on_the_host() -> None:
    given = jobset(job(has_gpus=False), Pods("i"))
    assert found(given, "limits") == []
    assert found(given, "claimName") == []


def test_names_that_kubernetes_refuses() -> None:
    for name in ("Lm", "9lm", "lm-", "l_m", "l.m", ""):
        assert "no DNS label" in kind_violations("jobset", name, 2, runtime=None, max_restarts=0)[0]
    # 63 characters, less `-node-0-99` and six of Kubernetes' own.
    assert kind_violations("jobset", "a" * 47, 100, runtime=None, max_restarts=0) == []
    (violation,) = kind_violations("jobset", "a" * 48, 100, runtime=None, max_restarts=0)
    assert "give at most 47" in violation
    assert len(kind_violations("jobset", "lm", 2, runtime="torch", max_restarts=0)) == 1
    assert len(kind_violations("trainjob", "lm", 2, runtime="torch", max_restarts=1)) == 1


def test_the_check_of_schemas_finds_faults() -> None:
    given = jobset(job(), PODS)
    given["spec"]["replicatedJobs"][0]["template"]["spec"]["completionMod"] = "Indexed"
    given["spec"]["failurePolicy"]["maxRestarts"] = "2"
    del given["spec"]["replicatedJobs"][0]["name"]
    assert len(schema_errors(given, "jobset")) == 3

"""Reduce a CRD to the fields of the manifests: ``python reduce.py CRD.yaml SOURCE > KIND.yaml``.

Every object that a manifest may reach keeps the names of all its fields; the others keep their type alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

REACHED = frozenset(
    {
        "spec",
        "network",
        "failurePolicy",
        "replicatedJobs",
        "template",
        "trainer",
        "runtimeRef",
        "runtimePatches",
        "trainingRuntimeSpec",
        "runPolicy",
        "pytorchReplicaSpecs",
        "containers",
        "env",
        "valueFrom",
        "fieldRef",
        "ports",
        "resources",
        "resourcesPerNode",
        "limits",
        "requests",
        "volumes",
        "volumeMounts",
        "emptyDir",
        "persistentVolumeClaim",
    }
)
KEPT = ("type", "required", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "maxItems", "minItems")
KEPT_OF_KUBERNETES = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")


def reduced(schema: dict[str, Any], *, is_reached: bool = True) -> dict[str, Any]:
    found = {name: schema[name] for name in (*KEPT, *KEPT_OF_KUBERNETES) if name in schema}
    if not is_reached:
        return {name: value for name, value in found.items() if name not in ("required", "minItems")}
    for name in ("properties",):
        if name in schema:
            found[name] = {key: reduced(each, is_reached=key in REACHED) for key, each in schema[name].items()}
    for name in ("items", "additionalProperties", "anyOf"):
        if isinstance(each := schema.get(name), dict):
            found[name] = reduced(each)
        elif isinstance(each, list):
            found[name] = [reduced(one) for one in each]
    return found


def main() -> None:
    path, source = sys.argv[1:]
    (version,) = [each for each in yaml.safe_load(Path(path).read_text())["spec"]["versions"] if each["served"]]
    print(f"# Reduced by reduce.py from {source}, version {version['name']}; Apache-2.0.")
    print(yaml.safe_dump(reduced(version["schema"]["openAPIV3Schema"]), sort_keys=False), end="")


if __name__ == "__main__":
    main()

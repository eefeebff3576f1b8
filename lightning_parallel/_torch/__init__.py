"""Every private or version-dependent name of torch that the package touches, by subject.

Each function says since which version the name exists and which public call would replace it. Nothing else in the
package may import a name of torch that begins with an underscore (a test enforces it).
"""

from lightning_parallel._torch import (
    attention,
    autograd,
    ddp,
    flight_recorder,
    flops,
    fsdp,
    groups,
    host_reads,
    joint_operations,
    loaders,
    mixed_lists,
    modes,
    modules,
    optimizers,
    part_operations,
    random_states,
    random_turns,
    sample_draws,
    schedules,
    tensors,
    unit_calls,
    unit_classes,
    unit_parameters,
    whole_operands,
)

__all__ = [
    "attention",
    "autograd",
    "ddp",
    "flight_recorder",
    "flops",
    "fsdp",
    "groups",
    "host_reads",
    "joint_operations",
    "loaders",
    "mixed_lists",
    "modes",
    "modules",
    "optimizers",
    "part_operations",
    "random_states",
    "random_turns",
    "sample_draws",
    "schedules",
    "tensors",
    "unit_calls",
    "unit_classes",
    "unit_parameters",
    "whole_operands",
]

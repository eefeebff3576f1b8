"""Comparison of single values: those that runs have logged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_parallel import _torch
from lightning_parallel.module.differences import first_of
from lightning_parallel.verification.certificate import DIFFERS, EQUAL, SKIPPED, Finding
from lightning_parallel.verification.records import Record


def of_logged(readers: Sequence[Record], reference: Record, tolerance: float) -> Finding:
    """Values of each step, and those of an epoch that all readers agree on."""
    if not reference.microsteps:
        return Finding("logged values", SKIPPED, "there was no step")
    statistics = readers[0].num_readers > 1 and has_statistics(readers[0])
    agreed, in_steps, left_out, wrong = [], [], [], []
    for name in reference.logged:
        is_of_steps = all(name in step.logged for step in reference.microsteps)
        is_agreed = _is_agreed(name, [record.logged for record in readers])
        of_epoch = readers[0].logged.get(name) != readers[0].microsteps[-1].logged.get(name)
        if is_of_steps and any(_is_unsteady(name, record, tolerance) for record in readers):
            left_out.append(name)
        elif is_of_steps and (text := _step_difference(name, readers, reference, tolerance)):
            if reference.takes == "joined":  # one process has no value of one reader's batch
                left_out.append(name)
            else:
                wrong.append(text)
        elif is_of_steps and not (of_epoch and is_agreed):
            in_steps.append(name)
        elif not is_agreed or (statistics and name in readers[0].of_validation):
            left_out.append(name)  # of samples, or by running statistics, of one rank
        elif relative_difference(readers[0].logged[name], reference.logged[name]) <= tolerance:
            agreed.append(name)
        else:
            wrong.append(f"{name} is {readers[0].logged[name]} in place of {reference.logged[name]}")
    if missing := [name for name in reference.logged if not all(name in record.logged for record in readers)]:
        wrong += [f"{name} is missing" for name in missing]
    if wrong:
        return Finding("logged values", DIFFERS, first_of(wrong))
    if not reference.logged:
        return Finding("logged values", SKIPPED, "there are none")
    texts = [first_of(agreed)] if agreed else []
    texts += [f"in each step: {first_of(in_steps)}"] if in_steps else []
    texts += [f"of each rank's own samples, so not compared: {first_of(left_out)}"] if left_out else []
    return Finding("logged values", EQUAL if agreed or in_steps else SKIPPED, "; ".join(texts))


def _step_difference(name: str, readers: Sequence[Record], reference: Record, tolerance: float) -> str:
    """Where a value of a step differs: it is that of a reader's own batch, or one of all (``sync_dist=True``)."""
    size = len(readers) if reference.takes == "turns" else 1
    for number, turn in enumerate(zip(*(record.microsteps for record in readers), strict=True)):
        steps = reference.microsteps[number * size : (number + 1) * size]
        theirs = [step.logged[name] for step in steps]
        reduced = [sum(theirs) / len(theirs), sum(theirs), min(theirs), max(theirs)]
        for reader, step in enumerate(turn):
            own = step.logged.get(name)
            if not any(relative_difference(own, each) <= tolerance for each in (theirs[reader % size], *reduced)):
                rank = readers[reader].rank
                return f"in step {number}, rank {rank} has {name} {own}, one process has {theirs[reader % size]}"
    return ""


def has_statistics(record: Record) -> bool:
    """Whether steps have written buffers, as BatchNorm does."""
    return any(
        not _torch.dense_parts.is_same(record.weights[0][name], record.weights[-1][name]) for name in record.buffers
    )


def _is_unsteady(name: str, record: Record, tolerance: float) -> bool:
    """Whether a value is another one when the same steps are taken again, such as a time."""
    steps = record.microsteps[record.saved_after[0] :] if record.saved_after else []
    return any(
        not relative_difference(step.logged.get(name), again.get(name)) <= tolerance
        for step, again in zip(steps, record.again, strict=False)
    )


def _is_agreed(name: str, values: Sequence[Mapping[str, float]]) -> bool:
    return all(name in each and _same(each[name], values[0][name]) for each in values)


def of_values(
    subject: str, ours: Sequence[Mapping[str, float]], theirs: Mapping[str, float], tolerance: float
) -> Finding:
    """Values that all readers agree on; others are those of one rank's samples."""
    agreed = [name for name in theirs if _is_agreed(name, ours)]
    wrong = [name for name in agreed if not relative_difference(ours[0][name], theirs[name]) <= tolerance]
    missing = [name for name in theirs if not all(name in each for each in ours)]
    if wrong or missing:
        texts = [f"{name} is {ours[0][name]} in place of {theirs[name]}" for name in wrong]
        return Finding(subject, DIFFERS, first_of([*texts, *(f"{name} is missing" for name in missing)]))
    own = [name for name in theirs if name not in agreed]
    more = f"; of each rank's own samples, so not compared: {first_of(own)}" if own else ""
    if not agreed:
        return Finding(subject, SKIPPED, "there are none" if not own else more.removeprefix("; "))
    return Finding(subject, EQUAL, first_of(agreed) + more)


def relative_difference(ours: float | None, theirs: float | None) -> float:
    """Their distance as a share of `theirs`; infinite if only one of them is there, 0 for two NaNs."""
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else math.inf
    return 0.0 if _same(ours, theirs) else abs(ours - theirs) / (abs(theirs) or 1.0)


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))

"""Comparison of the records of all ranks with one of one process."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_parallel.module.differences import first_of
from lightning_parallel.verification.certificate import DIFFERS, EQUAL, SKIPPED, Finding
from lightning_parallel.verification.records import Evaluation, Record, readers_of
from lightning_parallel.verification.values import has_statistics, of_logged, of_values, relative_difference

_FLOOR = 1e-3
"""The share of the movement of all weights below which that of one is noise: a bias that softmax cancels has gradients
that are nothing but rounding, which some optimizers make large."""
_UNSEEDED = "the step draws random numbers (dropout), which ranks that share samples draw for their parts"
_MANUAL = "manual optimization updates in each step, and the batches of the readers cannot be joined to one"
_DRAWN = "manual optimization that draws random numbers: one process draws others for the joined batch"
_OF_BATCHES = "manual optimization, and the loss of a joined batch is not the mean of its parts' (as with BatchNorm)"


def compare(records: Sequence[Record], reference: Record | None, tolerance: float) -> list[Finding]:
    """Compare a run on several ranks with one of one process.

    Args:
        records: Of all ranks.
        reference: Of one process that took the same steps; ``None`` where there could be none.
        tolerance: The largest relative difference that counts as equal.

    Returns:
        A finding for each comparison.
    """
    readers = readers_of(list(records))
    if len(readers) != (wanted := records[0].num_readers):
        each = ", ".join(f"rank {record.rank} part {record.reader}" for record in records)
        return [Finding("samples", DIFFERS, f"ranks are to read {wanted} parts of the samples, and of these, {each}")]
    found = [_first_step(records[0]), *_of_samples(records, readers), *_of_random_numbers(records, readers, reference)]
    reason = _incomparable(records[0], readers, reference)
    if reference is not None and not reason:
        found += [
            _of_losses(readers, reference, tolerance),
            _of_weights(records[0], reference, tolerance),
            of_logged(readers, reference, tolerance),
        ]
    elif reason:
        found.append(Finding("losses and weights", SKIPPED, reason))
    if reference is not None:
        for name in records[0].evaluations:
            found += _of_evaluation(name, readers, reference.evaluations.get(name), tolerance)
    return [*found, _of_resuming(records[0], tolerance)]


def _incomparable(record: Record, readers: Sequence[Record], reference: Record | None) -> str:
    if record.shares_samples and _draws(reference):
        return _UNSEEDED
    if reference is None or reference.takes == "first":
        return _MANUAL if record.is_manual and len(readers) > 1 else ""
    if reference.takes == "joined" and _draws(reference):
        return _DRAWN
    return _OF_BATCHES if reference.takes == "joined" and not _is_mean_of_parts(record, readers, reference) else ""


def _is_mean_of_parts(record: Record, readers: Sequence[Record], reference: Record) -> bool:
    """Whether the step of joined batches computes what those of the parts do: no statistics of batches, one loss."""
    if has_statistics(record):
        return False
    own = [each.microsteps[0].loss for each in readers]  # of the same weights: another loss is another function
    return relative_difference(_mean(own), reference.microsteps[0].loss) <= _FLOOR


def _draws(reference: Record | None) -> bool:
    """Whether a step draws random numbers in one process: under a pipeline, each step draws seeds for its parts."""
    return reference is not None and any(step.draws for step in reference.microsteps)


def _first_step(record: Record) -> Finding:
    said = record.first_step.removeprefix("first step ")
    if said.startswith("equals"):
        return Finding("first step", EQUAL, said)
    return Finding("first step", SKIPPED, said.removeprefix("not compared with one process: ") or "nothing was said")


def _of_samples(records: Sequence[Record], readers: Sequence[Record]) -> Iterator[Finding]:
    """Ranks of one reader read the same batches, and readers between them each sample once."""
    for record in records:
        own = [step.fingerprint for step in record.microsteps]
        if own != (expected := [step.fingerprint for step in readers[record.reader].microsteps]):
            at = next(
                (n for n, (a, b) in enumerate(zip(own, expected, strict=False)) if a != b), min(len(own), len(expected))
            )
            ranks = f"ranks {readers[record.reader].rank} and {record.rank} compute samples together"
            yield Finding("batches", DIFFERS, f"{ranks}, and read different batches in step {at}")
            return
    if len(readers) == 1:
        return
    for first, second in itertools.combinations(readers, 2):
        pairs = zip(first.microsteps, second.microsteps, strict=False)
        same = [number for number, (a, b) in enumerate(pairs) if a.fingerprint == b.fingerprint]
        if same:
            both = f"ranks {first.rank} and {second.rank} read the same batch in step {same[0]}"
            yield Finding("batches", DIFFERS, f"{both}, though they are to read different samples")
            return
    yield _of_indices(readers)


def _of_indices(readers: Sequence[Record]) -> Finding:
    if any(record.indices is None for record in readers):
        return Finding("samples", SKIPPED, "the loader has a sampler of its own, or none")
    counts = Counter(index for record in readers for index in record.indices or ())
    size = readers[0].num_samples
    missing = [index for index in range(size) if index not in counts]
    repeated = sum(count - 1 for count in counts.values())
    # Where samples do not come out even, the first ones follow the last ones, at most one a reader and batch.
    most = max(len(record.indices or ()) for record in readers) * len(readers) - size
    num_dropped = sum(record.num_dropped for record in readers)
    if num_dropped:
        most = max(most, len(readers) - 1)
    if len(missing) > num_dropped or repeated > most or repeated >= size:
        return Finding(
            "samples", DIFFERS, f"of {size} samples an epoch leaves out {len(missing)} and reads {repeated} twice"
        )
    twice = f", {repeated} of them twice, as {size} is no multiple of {len(readers)}" if repeated else ""
    dropped = f", without the last {len(missing)} (drop_last)" if missing else ""
    return Finding("samples", EQUAL, f"an epoch reads each of {size} samples once{twice}{dropped}")


def _of_random_numbers(
    records: Sequence[Record], readers: Sequence[Record], reference: Record | None
) -> Iterator[Finding]:
    """Readers draw different numbers, ranks that share samples begin alike."""
    if not _draws(reference):
        return
    for first, second in itertools.combinations(records, 2):
        pairs = zip(first.microsteps, second.microsteps, strict=False)
        alike = [torch.equal(a.random.host, b.random.host) for a, b in pairs if a.random and b.random]
        is_shared = first.reader == second.reader
        if alike and alike[0] != is_shared:
            ranks = f"ranks {first.rank} and {second.rank}"
            how = "share samples and draw different" if is_shared else "read different samples and draw the same"
            yield Finding("random numbers", DIFFERS, f"{ranks} {how} random numbers in step 0")
            return
    readers_text = "differ between readers" if len(readers) > 1 else "are the same on ranks that share samples"
    yield Finding("random numbers", EQUAL, f"streams {readers_text}")


def _of_losses(readers: Sequence[Record], reference: Record, tolerance: float) -> Finding:
    turns = [[step.loss for step in turn] for turn in zip(*(record.microsteps for record in readers), strict=True)]
    whose = [f"rank {record.rank} has" for record in readers]
    if reference.takes == "joined":
        turns, whose = [[_mean(turn)] for turn in turns], ["the mean over ranks is"]
    ours = [loss for turn in turns for loss in turn]
    largest = 0.0
    for number, (own, theirs) in enumerate(zip(ours, reference.microsteps, strict=True)):
        if (apart := relative_difference(own, theirs.loss)) > tolerance or math.isnan(apart):
            step, reader = divmod(number, len(whose))
            return Finding("losses", DIFFERS, f"in step {step}, {whose[reader]} {own}, one process has {theirs.loss}")
        largest = max(largest, apart)
    if all(loss is None for loss in ours):
        return Finding("losses", SKIPPED, "the step returns none")
    return Finding("losses", EQUAL, f"{len(ours)} losses, largest relative difference {largest:.0e}")


def _of_weights(ours: Record, theirs: Record, tolerance: float) -> Finding:
    if len(ours.weights) != len(theirs.weights):
        return Finding(
            "weights", DIFFERS, f"{len(ours.weights) - 1} updates, and {len(theirs.weights) - 1} in one process"
        )
    largest = 0.0
    for update, (own, other) in enumerate(zip(ours.weights, theirs.weights, strict=True)):
        if ours.num_readers > 1:
            # Running statistics are those of one rank's samples.
            own, other = ({n: each[n] for n in each if n not in ours.buffers} for each in (own, other))
        found = _weight_differences(own, other, theirs.weights[0] if update else {})
        wrong = {name: apart for name, apart in found.items() if not apart <= tolerance}
        if wrong:
            when = f"after update {update}" if update else "before the first update, from the same seed"
            return Finding("weights", DIFFERS, f"{when}: {_largest_of(wrong)}")
        largest = max([largest, *found.values()])
    return Finding(
        "weights",
        EQUAL,
        f"{len(own)} tensors after each of {len(ours.weights) - 1} updates, largest difference "
        f"{largest:.0e} of what they have moved",
    )


def _weight_differences(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, float]:
    """Differences as shares of the distance from `before`, of each tensor of floating point numbers."""
    if list(ours) != list(theirs):
        other = [name for name in {**ours, **theirs} if name not in ours or name not in theirs]
        return dict.fromkeys(other or ["the order of names"], math.inf)
    moved = {n: _distance(theirs[n], before[n]) if n in before else float(theirs[n].double().norm()) for n in theirs}
    total = math.sqrt(sum(each**2 for each in moved.values()))
    found = {}
    for name, own in ours.items():
        apart = _distance(own, theirs[name])
        found[name] = 0.0 if apart == 0.0 else apart / (moved[name] + _FLOOR * total or math.nan)
    return found


def _of_evaluation(
    name: str, readers: Sequence[Record], theirs: Evaluation | None, tolerance: float
) -> Iterator[Finding]:
    ours = [record.evaluations[name] for record in readers]
    if theirs is None:
        yield Finding(name, SKIPPED, "one process did not run it")
        return
    if name != "predict":
        yield of_values(name, [each.values for each in ours], theirs.values, tolerance)
        return
    turns = [zip(*loaders, strict=True) for loaders in zip(*(each.predictions for each in ours), strict=True)]
    flat = [tensors for turn in turns for together in turn for tensors in together]
    expected = [tensors for loader in theirs.predictions for tensors in loader]
    apart = [
        _distance(a, b) / (float(b.double().norm()) or 1.0)
        for own, other in zip(flat, expected, strict=True)
        for a, b in zip(own, other, strict=True)
    ]
    outcome = EQUAL if all(each <= tolerance for each in apart) else DIFFERS
    yield Finding(name, outcome, f"{len(flat)} batches, largest relative difference {max(apart, default=0.0):.0e}")


def _of_resuming(record: Record, tolerance: float) -> Finding:
    if not record.resumed:
        return Finding("resuming", SKIPPED, "there were fewer than two updates")
    assert record.saved_after is not None
    middle = record.saved_after[1]
    found = _weight_differences(record.resumed, record.weights[-1], record.weights[middle])
    wrong = {name: apart for name, apart in found.items() if not apart <= tolerance}
    where = f"from the checkpoint of update {middle} to update {len(record.weights) - 1}"
    if wrong:
        return Finding("resuming", DIFFERS, f"{where}: {_largest_of(wrong)}")
    return Finding("resuming", EQUAL, f"{where}, as without an end in between")


def _largest_of(differences: Mapping[str, float]) -> str:
    names = sorted(differences, key=lambda name: -differences[name])
    return first_of([f"{name} by {differences[name]:.0e}" for name in names])


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if known and len(known) == len(losses) else None


def _distance(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    return float((first.double() - second.double()).norm())

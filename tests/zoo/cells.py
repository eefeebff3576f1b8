"""One cell of the zoo: a module under a name against one process."""

from __future__ import annotations

import functools
import traceback
import warnings
from typing import Any

import lightning as L
import torch

from lightning_parallel import ConfigurationError
from lightning_parallel.errors import FirstStepError
from tests.jobs.first_steps import said
from tests.names import num_readers
from tests.parity import Outcome, Recorder, is_moving, largest, make_trainer
from tests.rank_pool import RankError
from tests.zoo import decoders, encoders, images, others, published, series
from tests.zoo.registry import ZOO
from tests.zoo.steps import FrozenStatistics, Published, loader_of

FILES = (decoders, encoders, images, others, published, series)
"""They enter their modules in `ZOO` where they are imported."""

NAMES = ("ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "cp_custom", "pp_custom")

TOLERANCE = 5e-3
"""Of what training changed in the same tensor; see `relative_difference`. Most cells differ by 1e-5 to 1e-4 and the
worst by 1e-3, where sums are of small differences; a gradient that misses a sample, a layer or a rank is off by more
than a tenth."""

SMALLEST = 1e-3
"""Of the largest change in the model: tensors that change less are compared with this. Some have no gradient but what
rounding leaves, such as the biases of keys."""

SAYS = ("the loss", "the gradient", "behind the first steps", "in step")
"""What is said of numbers that are not those of one process begins so."""

DEFECTS = ("wrong", "hangs", "crashes", "differs")
"""What a cell should not be."""

ORDER = ("crashes", "differs", "refused")
"""Of what is said where ranks say different things: the first of these is the worst."""


def train(module: str, name: str, num_ranks: int) -> tuple[Outcome, list[str]]:
    """A few steps under a name, and what is said of numbers that differ.

    On every rank of a pool, or in one process with ``"auto"``.
    """
    from lightning_parallel import build_strategy, full_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the packages say to each other is not looked at
        L.seed_everything(3, verbose=False)
        built, recorder = ZOO[module].build(), Recorder()
        strategy: Any = "auto" if name == "auto" else build_strategy(name)
        trainer = make_trainer(strategy, num_ranks, callbacks=[FrozenStatistics(), recorder])
        readers = 1 if name == "auto" else num_readers(name.partition(":")[0], num_ranks)
        module = built.module if isinstance(built, Published) else built
        with said(*SAYS) as found:
            trainer.fit(module, loader_of(built, readers))
        recorder.outcome.final = full_state_dict(trainer)
        return recorder.outcome, found


def try_to_train(module: str, name: str, num_ranks: int) -> tuple[str, Any]:
    """The same on a rank: ``"runs"`` and what came of it, or another word and what was said."""
    try:
        return "runs", train(module, name, num_ranks)
    except ConfigurationError as error:
        return "refused", "\n".join(error.violations)
    except FirstStepError as error:
        return "differs", str(error)
    except Exception as error:
        return "crashes", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


@functools.cache
def reference(module: str) -> Outcome:
    """In one process, once a session."""
    outcome, _ = train(module, "auto", 1)
    assert is_moving(outcome)
    assert all(torch.isfinite(torch.tensor(outcome.losses)))
    return outcome


def relative_difference(ours: Outcome, theirs: Outcome) -> float:
    """The largest difference of losses, relative to them, and of tensors, relative to what training changed in them."""
    losses = [abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    assert list(ours.final) == list(ours.initial) == list(theirs.final)
    assert all(torch.equal(ours.initial[name], tensor) for name, tensor in theirs.initial.items())
    moved = {name: (tensor.double() - theirs.initial[name].double()).abs() for name, tensor in theirs.final.items()}
    changes = {name: float(change.max()) if change.numel() else 0.0 for name, change in moved.items()}
    floor = SMALLEST * max(changes.values())
    tensors = [
        float((ours.final[name].double() - tensor.double()).abs().max()) / max(changes[name], floor)
        for name, tensor in theirs.final.items()
        if tensor.numel()
    ]
    return largest([*losses, *tensors])


def run_cell(ranks: Any, module: str, name: str) -> tuple[str, str]:
    """Train a module under a name on two ranks of a pool.

    Returns:
        ``"runs"`` and the largest relative difference; ``"told"`` and what is said of a larger one, such as a sum over
        samples, whose mean over ranks is no loss of one process; or ``"refused"``, ``"wrong"``, ``"differs"`` (which
        the package itself found in the first step), ``"crashes"`` or ``"hangs"`` and what was said.
    """
    expected = reference(module)
    try:
        answers = ranks(2).run(try_to_train, module, name, 2)
    except RankError as error:
        return "hangs", str(error)
    ended = [answer for answer in answers if answer[0] != "runs"]
    if ended:
        if any(word != "refused" for word, _ in answers):
            ranks(2).close()  # the next cell finds a new pair, whatever the error left behind
        word, text = min(ended, key=lambda answer: ORDER.index(answer[0]))
        return word, str(text)
    outcome, told = answers[0][1]
    difference = relative_difference(outcome, expected)
    if difference <= TOLERANCE:
        return "runs", f"relative difference {difference:.0e}"
    return ("told", told[0]) if told else ("wrong", f"relative difference {difference:.0e}")

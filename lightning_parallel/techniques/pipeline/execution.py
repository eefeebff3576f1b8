"""Run a schedule: compute, send and receive in the order that torch's schedules give.

Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B and interleaved); Qi et al. 2024 (ZB-V); DeepSeek-AI 2024
(DualPipe). Torch's own executor requires all steps to have the shapes of the first; here, each boundary announces the
shapes once in every step. Hidden states are sent first, then side inputs, if there are any.

Backward computes gradients of inputs and weights together, as FSDP2 knows no other way. Backward is not split, so
zero-bubble schedules bring no speed-up yet; their order of actions is kept.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.techniques.pipeline.joined import PartGradients, Passed
from lightning_parallel.techniques.pipeline.passed_forms import HEADER, Form, forms_of, in_words
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan
from lightning_parallel.techniques.pipeline.unused_inputs import UnusedInputs

_ACTION = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")
JOIN = "JOIN"
_Key = tuple[int, int]


@dataclass(frozen=True)
class Action:
    """One action of a rank in a step.

    Args:
        kind: The kind in torch's notation, such as ``"F"`` or ``"SEND_B"``.
        stage: The stage's number.
        microbatch: The microbatch's number.
    """

    kind: str
    stage: int
    microbatch: int


@functools.lru_cache
def training_actions(
    policy: PipelinePolicy, plan: StagePlan, count: int, rank: int, *, joins: bool = False
) -> tuple[Action, ...]:
    """List the actions of a rank in a training step.

    Args:
        policy: The rules, with the schedule.
        plan: The stages and their ranks.
        count: The number of microbatches.
        rank: The rank on the pipeline axis.
        joins: Whether the outputs of all microbatches are joined before the first backward.
    """
    if joins:
        # Backward takes the chunks of stages in the reverse of their order in forward, so that all ranks have work.
        chunks = [list(range(begin, begin + plan.num_ranks)) for begin in range(0, plan.num_stages, plan.num_ranks)]
        backward = [f"{s}B{m}" for chunk in chunks[::-1] for m in range(count) for s in chunk[::-1]]
        return _with_join(_parsed(_with_transfers(plan, [*_forwards(plan, count), *backward])[rank]), plan)
    if policy.fits(count, plan.num_ranks):
        name = policy.schedule
        return _parsed(_torch.schedules.schedule_actions(name, plan.num_ranks, policy.stages_per_rank, count)[rank])
    # Too few microbatches for the schedule, such as in the last batch of an epoch: all forwards, then all backwards.
    backward = [f"{s}B{m}" for m in range(count) for s in range(plan.last, -1, -1)]
    return _parsed(_with_transfers(plan, [*_forwards(plan, count), *backward])[rank])


@functools.lru_cache
def evaluation_actions(plan: StagePlan, count: int, rank: int, *, joins: bool = False) -> tuple[Action, ...]:
    """List the actions of a rank in a step without backward.

    Args:
        plan: The stages and their ranks.
        count: The number of microbatches.
        rank: The rank on the pipeline axis.
        joins: Whether the outputs of all microbatches are joined in the end.
    """
    actions = _parsed(_with_transfers(plan, _forwards(plan, count))[rank])
    return _with_join(actions, plan) if joins else actions


def _with_join(actions: tuple[Action, ...], plan: StagePlan) -> tuple[Action, ...]:
    """Put the action `JOIN` behind the last forward of the last stage, on the rank that has it."""
    ends = [place for place, action in enumerate(actions) if (action.kind, action.stage) == ("F", plan.last)]
    if not ends:
        return actions
    return (*actions[: ends[-1] + 1], Action(JOIN, plan.last, 0), *actions[ends[-1] + 1 :])


def _forwards(plan: StagePlan, count: int) -> list[str]:
    chunk = plan.num_ranks
    chunks = range(0, plan.num_stages, chunk)
    return [f"{s}F{m}" for begin in chunks for m in range(count) for s in range(begin, begin + chunk)]


def _with_transfers(plan: StagePlan, computed: list[str]) -> list[list[str]]:
    by_rank: list[list[str]] = [[] for _ in range(plan.num_ranks)]
    for action in computed:
        by_rank[plan.rank_of(int(re.match(r"\d+", action).group()))].append(action)  # type: ignore[union-attr]
    return _torch.schedules.with_transfers(by_rank, is_v=plan.is_v)


def _parsed(texts: Sequence[str]) -> tuple[Action, ...]:
    matches = [_ACTION.fullmatch(text) for text in texts]
    return tuple(Action(m[2], int(m[1]), int(m[3])) for m in matches if m is not None)


class Execution:
    """One step of the stages of this rank.

    Args:
        plan: The stages and their ranks.
        group: The ranks of the pipeline.
        host_group: The same, for host memory.
        device: This rank's device.
        forward: Takes a stage, a microbatch and the received tensors; returns the tensors to send on, or for the last
            stage the scalar from which backward starts.
        num_passed: Takes a stage; returns the number of tensors that it receives.
        before_backward: Called before each backward.
        waiting: Makes a context for each wait for another rank.
        join: Takes what the last stage has computed for all microbatches, runs the rest of the step, and returns its
            gradients for each; where none is given, the last stage's `forward` does all of it.
    """

    def __init__(
        self,
        plan: StagePlan,
        *,
        group: ProcessGroup,
        host_group: ProcessGroup,
        device: torch.device,
        forward: Callable[[int, int, Passed | None], Passed | None],
        num_passed: Callable[[int], int],
        before_backward: Callable[[], None],
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        join: Callable[[list[Passed]], PartGradients] | None = None,
    ) -> None:
        self._plan = plan
        self._group = group
        self._host_group = host_group
        self._device = device
        self._forward = forward
        self._num_passed = num_passed
        self._before_backward = before_backward
        self._waiting = waiting
        self._join = join
        self._joined: PartGradients = []
        self._arriving: dict[tuple[str, int, int], list[tuple[Tensor, dist.Work | None]]] = {}
        self._computed: dict[_Key, tuple[Passed | None, Passed | None]] = {}
        self._gradients: dict[_Key, Passed] = {}
        self._coming: dict[int, list[Form]] = {}
        self._unused = UnusedInputs(plan, host_group, waiting)
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def run(self, actions: Sequence[Action]) -> None:
        """Run all `actions`; returns when nothing is being sent any more."""
        does_backward = any(action.kind in ("B", "I") for action in actions)
        for action in actions:
            key = action.stage, action.microbatch
            if action.kind == "F":
                self._compute(*key, does_backward=does_backward)
            elif action.kind in ("B", "I"):
                self._compute_backward(*key)
            elif action.kind == JOIN:
                self._compute_joined(action.stage, keeps=does_backward)
            elif action.kind == "SEND_F":
                self._send_forward(*key, keeps=does_backward)
            elif action.kind == "RECV_F":
                self._receive("F", *key, self._plan.rank_of(action.stage - 1), self._announced(action.stage))
            elif action.kind == "SEND_B":
                self._send(self._gradients.pop(key), self._plan.rank_of(action.stage - 1))
            elif action.kind == "RECV_B":
                output = self._computed[key][1]
                assert output is not None
                wanted = [form for form in forms_of(output) if form.wants_gradient]
                self._receive("B", *key, self._plan.rank_of(action.stage + 1), wanted)
        with self._waiting():
            for _, work in self._sent:
                work.wait()
        self._sent = []
        self._unused.end()

    # Computing --------------------------------------------------------------------------------------------------

    def _compute(self, stage: int, microbatch: int, *, does_backward: bool) -> None:
        received = self._arrived("F", stage, microbatch) if stage else None
        if received is not None and does_backward:
            for tensor, form in zip(received, self._coming[stage], strict=True):
                tensor.requires_grad_(form.wants_gradient)
        output = self._forward(stage, microbatch, received)
        # In V-schedules a rank may have two neighbouring stages: nothing is sent, but the graph is cut all the same,
        # because each stage has its own backward.
        if stage < self._plan.last and self._is_here(stage + 1):
            assert output is not None
            self._coming[stage + 1] = forms_of(output)
            self._arriving["F", stage + 1, microbatch] = [(tensor.detach(), None) for tensor in output]
        if does_backward or not self._is_here(stage + 1):
            self._computed[stage, microbatch] = (received, output)

    def _compute_joined(self, stage: int, *, keeps: bool) -> None:
        assert self._join is not None
        found = [self._computed[key][1] for key in sorted(self._computed) if key[0] == stage]
        if not keeps:
            self._computed = {key: value for key, value in self._computed.items() if key[0] != stage}
        self._joined = self._join([passed for passed in found if passed is not None])

    def _compute_backward(self, stage: int, microbatch: int) -> None:
        received, output = self._computed.pop((stage, microbatch))
        assert output is not None
        pairs: list[tuple[Tensor, Tensor | None]]
        if stage == self._plan.last and self._join is not None:
            joined = zip(output, self._joined[microbatch], strict=True)
            pairs = [(tensor, gradient) for tensor, gradient in joined if tensor.requires_grad and gradient is not None]
        else:
            wanted = [tensor for tensor, form in zip(output, forms_of(output), strict=True) if form.wants_gradient]
            gradients = self._arrived("B", stage, microbatch) if stage < self._plan.last else (None,)
            unused = self._unused.behind(stage, len(wanted)) if stage < self._plan.last else [False]
            found = zip(wanted, gradients, unused, strict=True)
            pairs = [(t, gradient) for t, gradient, is_unused in found if t.requires_grad and not is_unused]
        self._before_backward()
        if pairs:
            # Backward runs outside of autocast, as under Lightning; forward has chosen the dtypes.
            with torch.autocast(self._device.type, enabled=False):
                torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        if received is None:
            return
        self._unused.tell(stage, [tensor.grad is None for tensor in received if tensor.requires_grad])
        # The stage before waits for each gradient, even where this stage did not use the tensor.
        own = tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in received if t.requires_grad)
        if self._is_here(stage - 1):
            self._arriving["B", stage - 1, microbatch] = [(gradient, None) for gradient in own]
        else:
            self._gradients[stage, microbatch] = own

    def _is_here(self, stage: int) -> bool:
        return stage <= self._plan.last and self._plan.rank_of(stage) == self._group.rank()

    # Sending and receiving --------------------------------------------------------------------------------------

    def _send_forward(self, stage: int, microbatch: int, *, keeps: bool) -> None:
        key = stage, microbatch
        output = self._computed[key][1] if keeps else self._computed.pop(key)[1]
        assert output is not None
        target, forms = self._plan.rank_of(stage + 1), forms_of(output)
        if stage + 1 not in self._coming:
            self._coming[stage + 1] = forms
            announced = torch.tensor([form.header() for form in forms])
            work = dist.isend(announced, group=self._host_group, group_dst=target)
            assert work is not None
            self._sent.append((announced, work))
        # The receiver allocates memory for the shapes of this step's first microbatch.
        if self._coming[stage + 1] != forms:
            raise ConfigurationError([_OTHER_FORMS.format(*map(in_words, (forms, self._coming[stage + 1])))])
        self._send(tuple(tensor.detach() for tensor in output), target)

    def _announced(self, stage: int) -> list[Form]:
        """Return the forms of the tensors that `stage` receives, announced once in each step."""
        if stage not in self._coming:
            header = torch.zeros(self._num_passed(stage), HEADER, dtype=torch.int64)
            with self._waiting():
                dist.recv(header, group=self._host_group, group_src=self._plan.rank_of(stage - 1))
            self._coming[stage] = [Form.announced(row) for row in header.tolist()]
        return self._coming[stage]

    def _send(self, tensors: Passed, target: int) -> None:
        # Tensors are kept alive until they have been sent; those that have arrived can be freed.
        self._sent = [(sent, earlier) for sent, earlier in self._sent if not earlier.is_completed()]
        for tensor in map(Tensor.contiguous, tensors):
            work = dist.isend(tensor, group=self._group, group_dst=target)
            assert work is not None
            self._sent.append((tensor, work))

    def _receive(self, kind: str, stage: int, microbatch: int, source: int, forms: Sequence[Form]) -> None:
        arriving = self._arriving.setdefault((kind, stage, microbatch), [])
        for form in forms:
            room = torch.empty(form.sizes, dtype=form.dtype, device=self._device)
            arriving.append((room, dist.irecv(room, group=self._group, group_src=source)))

    def _arrived(self, kind: str, stage: int, microbatch: int) -> Passed:
        found = self._arriving.pop((kind, stage, microbatch))
        with self._waiting():
            for _, work in found:
                if work is not None:
                    work.wait()
        return tuple(tensor for tensor, _ in found)


_OTHER_FORMS = (
    "a microbatch gives the next stage {}, and the first microbatch {}, as where a step leaves out samples, or pads "
    "them, by what they hold; do so in the data loader, or give schedule='turns' or pipeline=1"
)

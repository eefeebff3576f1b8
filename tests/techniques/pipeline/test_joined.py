"""Outputs of microbatches, joined and cut again."""

from __future__ import annotations

import torch

from lightning_parallel.techniques.pipeline.execution import JOIN, evaluation_actions, training_actions
from lightning_parallel.techniques.pipeline.joined import JoinedOutputs
from lightning_parallel.techniques.pipeline.schedules import SCHEDULES, PipelinePolicy, pipeline_violations
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan


def test_each_tensor_is_joined_along_its_own_dimension() -> None:
    parts = [(torch.randn(2, 5, requires_grad=True), torch.randn(3, 2), torch.randn(())) for _ in range(3)]
    joined = JoinedOutputs(parts)
    first, (second, third) = joined.in_place_of((torch.empty(6, 5), (torch.empty(3, 6), torch.empty(()))), "layer")
    assert torch.equal(first, torch.cat([part[0] for part in parts]))
    assert torch.equal(second, torch.cat([part[1] for part in parts], 1))
    assert third.data_ptr() not in [part[2].data_ptr() for part in parts]  # has no samples: nothing takes its place
    (first * torch.arange(6.0)[:, None]).sum().backward()
    gradients = joined.gradients()
    assert torch.equal(gradients[1][0], torch.tensor([2.0, 3.0])[:, None].expand(2, 5))
    assert all(gradient[1:] == (None, None) for gradient in gradients)


def test_side_inputs_come_last() -> None:
    parts = [(torch.randn(2, 5), torch.full((2, 1), float(n), requires_grad=True)) for n in range(2)]
    joined = JoinedOutputs(parts, 1)
    (condition,) = joined.side_inputs([torch.empty(4, 1)])
    assert condition.flatten().tolist() == [0, 0, 1, 1]
    assert condition.requires_grad
    joined.in_place_of(torch.empty(4, 5), "layer")


def test_a_single_microbatch_is_the_batch() -> None:
    hidden = torch.randn(2, 5, requires_grad=True)
    assert torch.equal(JoinedOutputs([(hidden,)]).in_place_of(torch.empty(2, 5), "layer"), hidden)


def test_all_forwards_come_before_the_join_and_all_backwards_after_it() -> None:
    for schedule in SCHEDULES:
        virtual = 2 if schedule in ("interleaved", "zbv", "dualpipev") else 1
        policy = PipelinePolicy(schedule=schedule, virtual_stages=virtual, loss="batch")
        assert pipeline_violations(policy, 2) == []
        plan = StagePlan(2, tuple(range(1, policy.num_stages(2) + 1)), is_v=policy.is_v)
        found = [training_actions(policy, plan, 4, rank, joins=True) for rank in range(2)]
        assert [JOIN in [action.kind for action in actions] for actions in found].count(True) == 1
        own = [(a.kind, a.stage) for a in found[plan.rank_of(plan.last)]]
        place = own.index((JOIN, plan.last))
        assert own[:place].count(("F", plan.last)) == 4
        assert [kind for kind, _ in own[place:]].count("B") == 4 * len(plan.stages_of(plan.rank_of(plan.last)))
        assert [a.kind for a in evaluation_actions(plan, 4, plan.rank_of(plan.last), joins=True)].count(JOIN) == 1


def test_another_loss_is_unknown() -> None:
    assert "loss='sum' is unknown; possible: auto, batch, microbatch" in pipeline_violations(
        PipelinePolicy(loss="sum"), 2
    )

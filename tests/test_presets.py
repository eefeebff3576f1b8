from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_parallel import ConfigurationError, DDPStrategy, MeshStrategy, ZeroStrategy, build_strategy
from lightning_parallel.presets import PRESETS
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy


def test_names_build_their_classes() -> None:
    assert type(build_strategy("ddp_custom")) is DDPStrategy
    assert type(build_strategy("zero1_custom")) is ZeroStrategy
    for name in ("zero2_custom", "fsdp_custom", "hsdp_custom", "fsdp_offload_custom", "pp_custom"):
        assert type(build_strategy(name)) is MeshStrategy


def test_options_have_their_types() -> None:
    strategy = build_strategy("fsdp_custom:reshard=2,layers=model.blocks,forward_methods=[model.a,b],timeout=30")
    assert strategy._policies.reshard == 2
    assert strategy._policies.layer.layers == "model.blocks"
    assert strategy._policies.forward_methods == ("model.a", "b")
    assert strategy._timeout == timedelta(seconds=30)
    assert build_strategy("fsdp_custom:layers=[a,b]")._policies.layer.layers == ["a", "b"]
    assert build_strategy("fsdp_custom:reshard=never")._policies.reshard == "never"
    pipeline = build_strategy("pp_custom:stages=[1,2],microbatches=4,schedule=gpipe")
    assert pipeline._degrees.pipeline == "node"
    assert pipeline._policies.pipeline == PipelinePolicy(schedule="gpipe", microbatches=4, stages=(1, 2))
    assert build_strategy("pp_custom:stages=auto")._policies.pipeline == PipelinePolicy()
    assert build_strategy("ddp_custom:static_graph=true")._ddp_options["static_graph"] is True


def test_an_option_wins_over_the_preset() -> None:
    assert build_strategy("zero2_custom")._policies.reshard == "never"
    assert build_strategy("zero2_custom:reshard=always")._policies.reshard == "always"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsdp_costum", ["'fsdp_costum' is unknown", "did you mean fsdp_custom", *PRESETS]),
        ("xyz", ["'xyz' is unknown", *PRESETS]),
        ("fsdp_custom:reshrad=2", ["no option 'reshrad'", "did you mean reshard?", "offload"]),
        ("ddp_custom:static_graph=maybe", ["static_graph='maybe'", "bool"]),
        ("fsdp_custom:shard=x", ["shard='x'", "int"]),
        ("fsdp_custom:offload", ["'offload'", "option=value"]),
        ("fsdp_custom:shard=2,shard=2", ["'shard'", "given twice"]),
        ("dp_custom:shard=2", ["no option 'shard'", "Possible: layers, recompute"]),
        ("fsdp_custom:a=1,shard=x,timeout=soon", ["3 problems", "'a'", "shard='x'", "timeout='soon'"]),
    ],
)
def test_all_that_is_wrong_in_the_string(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_strategy(text)
    for word in words:
        assert word in str(caught.value)

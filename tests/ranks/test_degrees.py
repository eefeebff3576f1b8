from __future__ import annotations

import subprocess
import sys

import pytest

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.degrees import Degrees, reshard_violations
from lightning_parallel.ranks.divisibility import degrees_for_heads, divisors, listed


@pytest.mark.parametrize(
    ("given", "world", "local", "expected"),
    [
        ({}, 4, 4, (1, 4, 1, 1, 1)),
        ({}, 16, 8, (1, 16, 1, 1, 1)),
        ({"replicate": "auto"}, 1, 1, (1, 1, 1, 1, 1)),
        ({"replicate": "auto"}, 2, 2, (2, 1, 1, 1, 1)),
        ({"replicate": "auto"}, 8, 8, (2, 4, 1, 1, 1)),
        ({"replicate": "auto"}, 16, 8, (2, 8, 1, 1, 1)),
        ({"replicate": "auto"}, 12, 4, (3, 4, 1, 1, 1)),
        ({"tensor": "node"}, 16, 8, (1, 2, 1, 8, 1)),
        ({"tensor": "auto"}, 8, 8, (1, 4, 1, 2, 1)),
        ({"tensor": "auto"}, 16, 8, (1, 2, 1, 8, 1)),
        ({"replicate": 2, "shard": 2, "context": 2, "tensor": 2, "pipeline": 2}, 32, 8, (2, 2, 2, 2, 2)),
    ],
)
def test_resolve(given: dict[str, object], world: int, local: int, expected: tuple[int, ...]) -> None:
    degrees = Degrees(**given).resolve(world, local)  # type: ignore[arg-type]
    assert (degrees.replicate, degrees.shard, degrees.context, degrees.tensor, degrees.pipeline) == expected
    assert degrees.data == expected[0] * expected[1]
    assert degrees.resolve(world, local) == degrees


@pytest.mark.parametrize(
    ("given", "world", "words"),
    [
        ({"shard": 3}, 4, ["shard 3 = 3 ranks, but there are 4", "give shard=4"]),
        ({"replicate": "auto"}, 3, ["replicate=2 does not divide 3 ranks", "1, 3", "even number of devices"]),
        ({"tensor": 3}, 4, ["tensor=3 does not divide 4 ranks", "1, 2, 4"]),
        ({"replicate": 3, "tensor": 2}, 8, ["replicate 3 x tensor 2 = 6 ranks", "1, 2, 4, 8"]),
        ({"replicate": 2, "shard": 3}, 4, ["replicate 2 x shard 3 = 6 ranks, but there are 4", "shard=2"]),
        ({"shard": 0, "tensor": -1, "pipeline": "auto"}, 4, ["3 problems", "shard=0", "tensor=-1", "pipeline='auto'"]),
        ({"shard": True}, 4, ["shard=True is not a degree"]),
    ],
)
def test_refusals_have_the_numbers(given: dict[str, object], world: int, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Degrees(**given).resolve(world)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_reshard() -> None:
    assert reshard_violations("always", 3) == reshard_violations("never", 3) == reshard_violations(2, 4) == []
    for bad in (3, 0, "sometimes", True):
        assert "possible" in reshard_violations(bad, 4)[0]
        assert "1, 2, 4" in reshard_violations(bad, 4)[0]


def test_degrees_need_no_torch() -> None:
    code = (
        "import importlib.util, sys, types\n"
        "sys.modules['lightning_parallel'] = types.ModuleType('lightning_parallel')\n"
        "for name in ('errors', 'ranks', 'ranks.divisibility', 'ranks.degrees'):\n"
        "    path = 'ranks/__init__' if name == 'ranks' else name.replace('.', '/')\n"
        "    spec = importlib.util.spec_from_file_location(f'lightning_parallel.{name}', f'{sys.argv[1]}/{path}.py')\n"
        "    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)\n"
        "    spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
    )
    import lightning_parallel

    folder = str(lightning_parallel.__path__[0])
    subprocess.run([sys.executable, "-c", code, folder], check=True)


def test_divisors() -> None:
    assert listed(divisors(12)) == "1, 2, 3, 4, 6, 12"
    assert divisors(128, at_most=64) == [1, 2, 4, 8, 16, 32, 64]
    assert divisors(0) == []


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"), [(12, 12, [1, 2, 3, 4, 6, 12]), (8, 2, [1, 2, 4, 8]), (12, 4, [1, 2, 4, 12])]
)
def test_degrees_for_heads(heads: int, kv_heads: int, expected: list[int]) -> None:
    assert degrees_for_heads(heads, kv_heads) == expected

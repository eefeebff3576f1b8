# python -m tests.benchmarks.verified
# python -m tests.benchmarks.verified --modules byte_gpt gan --names fsdp_custom pp_custom
# python -m tests.benchmarks.verified --out docs/benchmarks/verified.json
"""``lightning-parallel verify`` for every module and name of the support matrix.

Each cell trains three updates of a module in fp64 under a name, resumes from the first one, and is compared with one
process on the same batches, as docs/verify.md describes. It takes some ten minutes, and ends with status 1 if a cell
differs, or is refused for another reason than the matrix has.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.verification.comparison import compare
from tests.jobs.verification import in_one_process, module_of, recorded
from tests.names import num_ranks, num_readers
from tests.quiet import silence
from tests.rank_pool import RankError, RankPool

MATRIX = Path(__file__).parents[1] / "matrices" / "support_matrix.json"
TOLERANCE = 1e-5


def cell(pool: RankPool | None, case: str, name: str, folder: Path) -> dict[str, str]:
    """What a verification of one cell says: a comparison -> its outcome and detail."""
    make, size = module_of(case), num_ranks(name) if pool else 1
    arguments = (make, case, name, size, num_readers(name, size), folder)
    try:
        records = pool.run(recorded, *arguments) if pool else [recorded(*arguments)]
    except (ConfigurationError, RankError) as error:
        return {"refused": str(error)}
    return {
        found.subject: f"{found.outcome}: {found.detail}"
        for found in compare(records, in_one_process(make, records), TOLERANCE)
    }


def is_as_expected(found: dict[str, str], expected: str) -> bool:
    """Whether a cell is what the support matrix has."""
    if expected != "runs":
        return expected.removeprefix("refused: ") in found.get("refused", "")
    return "refused" not in found and not any(text.startswith("differs") for text in found.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the cells, and print a line for each; the exit status."""
    table = json.loads(MATRIX.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", choices=table["modules"], default=table["modules"])
    parser.add_argument("--names", nargs="+", choices=table["names"], default=table["names"])
    parser.add_argument("--out", type=Path, help="a file for all that was said, in JSON")
    options = parser.parse_args(arguments)
    silence()
    all_found: dict[str, dict[str, dict[str, str]]] = {}
    failures, pools = 0, dict[int, RankPool]()
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.names:
            size = num_ranks(name)
            if name != "dp_custom" and (size not in pools or not pools[size].is_alive):
                (folder := Path(temporary) / f"ranks_{size}_{name}").mkdir()
                pools[size] = RankPool(size, folder)
            for case in options.modules:
                folder = Path(temporary) / f"{name}_{case}"
                folder.mkdir()
                found = cell(None if name == "dp_custom" else pools[size], case, name, folder)
                all_found.setdefault(case, {})[name] = found
                is_right = is_as_expected(found, table["cells"][case][name])
                failures += not is_right
                print(f"{'ok' if is_right else 'WRONG':<6}{name:<20}{case:<20}{'; '.join(found)}", flush=True)
                if not is_right:
                    print("\n".join(f"    {subject}: {text[-2000:]}" for subject, text in found.items()), flush=True)
        for pool in pools.values():
            pool.close()
    if options.out:
        options.out.write_text(json.dumps(all_found, indent=2) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

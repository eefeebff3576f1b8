"""``python -m tests.lightning_suite CHECKOUT``: Lightning's tests under strategies of ours, beside the stock one."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.lightning_suite.comparison import Comparison, Suite

STOCK = "ddp"


def main() -> int:
    """Run, print, and return 1 if a test fails under ours alone and is not accepted."""
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="of Lightning, at the version that is installed")
    parser.add_argument("paths", nargs="*", help="of tests, relative to tests/tests_pytorch; else those of suite.toml")
    parser.add_argument("--strategy", action="append", help="ddp_custom and fsdp_custom if not given; may be repeated")
    parser.add_argument("--outcomes", type=Path, help="a folder; tests that it has already do not run again")
    parser.add_argument("--start-ranks", action="store_true", help="tests that start ranks, on the CPU")
    given = parser.parse_args()
    suite = Suite.read()
    with tempfile.TemporaryDirectory() as folder:
        kept = given.outcomes or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        outcomes = {
            name: suite.run(given.checkout, name, kept, paths=given.paths, start_ranks=given.start_ranks)
            for name in (STOCK, *(given.strategy or ("ddp_custom", "fsdp_custom")))
        }
    found = [
        Comparison(name, outcomes[STOCK], ours, suite.accepted) for name, ours in outcomes.items() if name != STOCK
    ]
    print("\n\n".join(each.report() for each in found))
    return int(any(each.unexplained or each.obsolete for each in found))


if __name__ == "__main__":
    sys.exit(main())

# python tests/benchmarks/import_time.py
"""What `import lightning_parallel` adds to `import lightning`: the median over fresh processes, one after the other."""

from __future__ import annotations

import statistics
import subprocess
import sys

CODE = """
import time
start = time.perf_counter()
import lightning
middle = time.perf_counter()
import lightning_parallel
print((time.perf_counter() - middle) / (middle - start))
"""


def main() -> None:
    """Print the share that is added."""
    command = [sys.executable, "-c", CODE]
    shares = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(9)]
    print(
        f"import lightning_parallel adds {statistics.median(shares):.1%} to import lightning (median of {len(shares)})"
    )


if __name__ == "__main__":
    main()

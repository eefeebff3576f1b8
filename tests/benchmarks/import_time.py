# python tests/benchmarks/import_time.py
"""What `import lightning_parallel` adds to `import lightning`: the median over fresh processes, one after the other.

All of it is compiled to bytecode before, as it is from a user's second import on.
"""

from __future__ import annotations

import os
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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    outputs = [subprocess.check_output(command, text=True, env=environment) for _ in range(10)]
    shares = [float(output) for output in outputs[1:]]
    print(
        f"import lightning_parallel adds {statistics.median(shares):.1%} to import lightning (median of {len(shares)})"
    )


if __name__ == "__main__":
    main()

"""Fail with one line unless the demo's results are right: ``python -m examples.check_demo RESULTS.json``."""

import json
import sys
from pathlib import Path


def main() -> None:
    faults = json.loads(Path(sys.argv[1]).read_text(encoding="utf8"))["faults"]
    if faults:
        raise SystemExit("the demo failed: " + "; ".join(faults))
    print("the plan is mixed, every loss agrees with the single process, and the model has learnt")


if __name__ == "__main__":
    main()

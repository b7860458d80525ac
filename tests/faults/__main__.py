"""``python -m tests.faults``: which of the planted faults the tests catch, and which suite does.

Each fault is planted alone, in a copy of the tree. The exit status is 1 if a fault survives, or if the quick suite
catches fewer than ``--quick`` of them.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from .plant import FAIL_ANYWAY, Caught, catch
from .rows import FAULTS, Fault

HEADER = ("fault", "file", "make test", "make test-all", "s", "caught by")


def cells(fault: Fault, caught: Caught) -> tuple[str, ...]:
    """One row of the table."""
    quick = "caught" if caught.suite == "quick" else "survives"
    rest = "-" if caught.suite == "quick" else "caught" if caught.suite else "SURVIVES"
    return fault.name, fault.file, quick, rest, f"{caught.seconds:.0f}", caught.test


def markdown(row: tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="faults whose name or file contains one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default: 2)")
    parser.add_argument("--quick", type=int, default=None, help="fewest that make test has to catch (default: 9 of 10)")
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    args, options = parser.parse_known_args()
    faults = [f for f in FAULTS if not args.only or any(word in f"{f.name} {f.file}" for word in args.only)]
    if args.list:
        print("\n".join(f"{fault.file}: {fault.name}" for fault in faults))
        return 0
    print(markdown(HEADER), markdown(("---",) * len(HEADER)), sep="\n", flush=True)
    results = []
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(catch, fault, tuple(options)): fault for fault in faults}
        for done in as_completed(running):
            results.append(done.result())
            print(markdown(cells(running[done], done.result())), flush=True)
    if FAIL_ANYWAY:
        print("\nleft out, because they fail without a fault too:", *sorted(FAIL_ANYWAY), sep="\n")
    quick, caught_at_all = sum(c.suite == "quick" for c in results), sum(bool(c.suite) for c in results)
    fewest = len(faults) * 9 // 10 if args.quick is None else args.quick
    print(f"\n{len(faults)} faults: make test catches {quick}, with make test-all {caught_at_all}")
    return int(caught_at_all < len(faults) or quick < fewest)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benches [GROUP ...] [--threads 1 2] [--json FILE]`: one table of ratios."""

from __future__ import annotations

import argparse
import importlib
import json

from afinar.autograd import set_num_threads

from .harness import environment, set_peer_threads

GROUPS = (
    "matmul",
    "attention",
    "losses",
    "rows",
    "adamw",
    "step",
    "avx2",
    "growth",
    "cold",
    "memory",
    "lora",
    "decode",
    "finetune",
    "gpu",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benches", description=__doc__)
    parser.add_argument("groups", nargs="*", default=GROUPS, help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", help="also write the rows here")
    args = parser.parse_args()
    facts = environment()
    print("  ".join(f"{k} {v}" for k, v in facts.items()))
    found = []
    for group in args.groups:
        bench = importlib.import_module(f".{group}", __package__)
        for threads in args.threads:
            set_num_threads(threads)
            set_peer_threads(threads)
            for row in bench.rows(threads):
                print(row, flush=True)
                found.append(row)
    missed = [r for r in found if r.target is not None and (r.ratio or 0) < r.target]
    print(f"{len(found)} rows, {len(missed)} targets missed")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"environment": facts, "rows": [r.as_dict() for r in found]}, f, indent=2)


if __name__ == "__main__":
    main()

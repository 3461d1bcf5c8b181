#!/usr/bin/env python3
"""A/A test: this build against its own commit, several times. Equal builds must give no win and an interval that covers 1
every time, and every row's median within 2 % of 1 in nine runs of ten. No gate: what is asked is what the clock says.

scripts/aa-test.py [RUNS] [OPTIONS OF fla verify ...]    default: 10 --op chunk_gla --shapes B1_T512_H16_D64,B1_T1_H16_D64
"""
import json
import pathlib
import subprocess
import sys

root = pathlib.Path(__file__).resolve().parent.parent
words = sys.argv[1:]
runs = int(words.pop(0)) if words and words[0].isdigit() else 10
options = words or ["--op", "chunk_gla", "--shapes", "B1_T512_H16_D64,B1_T1_H16_D64"]
near = no_win = covers = 0
for i in range(runs):
    command = [root / "build/release/bin/fla", "verify", *options, "--base", "HEAD", "--no-gate", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=root, text=True)
    try:
        result = json.loads(done.stdout)
        rows = result["rows"]
        medians = [r["speedup"] for r in rows]
        low, high = result["interval"]
        ok = None not in medians and low is not None
    except (ValueError, KeyError):
        ok = False
    if not ok:
        sys.exit(f"run {i + 1}: exit status {done.returncode}, no figures")
    within = all(abs(m - 1) <= 0.02 for m in medians)
    near += within
    blocked = any(f != "noisy" and not f.startswith("backend ") for r in rows for f in r["flags"])
    faster = low > 1 and result["geomean"] >= 1.02
    equal = not blocked and not faster and all(r["verdict"] == "same" for r in rows)
    no_win += equal
    covers += low <= 1 <= high and all(r["low"] <= 1 <= r["high"] for r in rows)
    machine = result["machine"]
    print(f"run {i + 1}: {'equal' if equal else 'NOT EQUAL'} [{low:.3f}, {high:.3f}]  medians", *(f"{m:.3f}" for m in medians),
          " pairs", *(f"{r['n']}/{r['timed']}" for r in rows),
          f" load {machine['load_before']:.1f} to {machine['load_after']:.1f}", flush=True)
print(f"{runs} runs: {no_win} no win, {covers} cover 1, {near} with every median within 1 +- 0.02")
sys.exit(0 if no_win == runs and covers == runs and near >= 0.9 * runs else 1)

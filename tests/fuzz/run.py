"""Run LIGER_HW_FUZZ random programs (10000 without it), show progress, and shorten each that differs.

    python -m liger_lab.tools.check fuzz       # or: python tests/fuzz/run.py
    LIGER_HW_FUZZ=500 FIRST_SEED=70000 python tests/fuzz/run.py

Ctrl-C ends it with the count so far. Ends with 1 if a program differed.
"""

import collections
import logging
import os
import random
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import programs  # noqa: E402
import torch  # noqa: E402

SECONDS_BETWEEN_LINES = 15
CHUNK = 100
_OUTCOMES = {type(None): "same", programs.Unjudged: "unjudged"}


def program_of(seed):
    """The family and the program of a seed."""
    draw = random.Random(seed)
    family = draw.choice(sorted(programs.FAMILIES))
    return family, [(draw.randrange(len(programs.ACTIONS)), draw.randrange(64)) for _ in range(draw.randint(3, 14))]


def difference(family, program):
    """What `run` of a program raises, or None."""
    try:
        programs.run(family, program)
    except Exception as error:  # a Difference, or an error of the comparison itself
        return error


def shortened(family, program, error):
    """The program without every action that its difference does not need, and the difference of that."""
    i = 0
    while i < len(program):
        shorter = program[:i] + program[i + 1 :]
        found = difference(family, shorter)
        if found is None:
            i += 1
        else:
            program, error = shorter, found
    return program, error


def run_chunk(seeds):
    """Run the programs of `seeds`; return how many ended how, and a line for each that differed."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)  # of a tiny model's operations, which are slower on more
    counts, lines = collections.Counter(), []
    for seed in seeds:
        family, program = program_of(seed)
        try:
            error = programs.run(family, program)
            counts[_OUTCOMES.get(type(error), "refused")] += 1
        except Exception as error:
            counts["differ"] += 1
            program, error = shortened(family, program, error)
            lines.append(f"seed {seed}: {type(error).__name__}: {str(error)[:800]}")
    return counts, lines


def main():
    count, first = int(os.environ.get("LIGER_HW_FUZZ", "10000")), int(os.environ.get("FIRST_SEED", "0"))
    counts, begin = collections.Counter(), time.monotonic()
    shown = begin

    def line():
        done, seconds = sum(counts.values()), time.monotonic() - begin
        print(
            f"{done}/{count} programs in {seconds:.0f} s: {counts['same']} the same, {counts['refused']} ended by an "
            f"error of both or a refusal that says what to do, {counts['unjudged']} ended by an error of the float64 "
            f"model, {counts['differ']} differ",
            flush=True,
        )

    # A new process for each chunk: after a thousand programs torch.compile takes minutes for one.
    pool = get_context("spawn").Pool(maxtasksperchild=1)
    chunks = [range(start, min(start + CHUNK, first + count)) for start in range(first, first + count, CHUNK)]
    try:
        for of_chunk, lines in pool.imap_unordered(run_chunk, chunks):
            counts.update(of_chunk)
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
            if time.monotonic() - shown > SECONDS_BETWEEN_LINES:
                shown = time.monotonic()
                line()
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        pool.terminate()
    line()
    return 1 if counts["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())

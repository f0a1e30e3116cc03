"""Patch every language model of transformers that can be made tiny, and write down what was replaced in which.

    python tools/models.py --output docs/models

writes docs/models.json, all that was found, and docs/models.md, what a reader wants of it. Ends with an error where a
model differs from its unpatched copy, or where fewer are served than promised.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "transformers")]
SECONDS_A_MODEL = 120
PROMISED = {"models": 220, "replaced": 0.99, "fused": 0.97}
PARTS = {"norm": ("rms_norm", "layer_norm"), "mlp": ("swiglu", "geglu", "activate"), "rotary": ("rope",)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="PATH", help="write PATH.json and PATH.md")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these model types or classes")
    arguments = parser.parse_args()
    found, not_tiny = sweep(arguments.only)
    figures, wrong = judge(found, complete=not arguments.only)
    print("\n".join(figures))
    if arguments.output:
        arguments.output.parent.mkdir(exist_ok=True)
        everything = {"versions": versions(), "models": found, "not_tiny": not_tiny}
        arguments.output.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(page(found, not_tiny, figures))
    sys.exit("\n".join(wrong) if wrong else 0)


def sweep(only=None):
    import compare
    import zoo

    def out_of_time(*_):
        raise zoo.NotTiny(f"takes more than {SECONDS_A_MODEL} s")

    signal.signal(signal.SIGALRM, out_of_time)
    zoo.transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    found, not_tiny = [], {}
    for model_type, cls in zoo.rows():
        if only and not {model_type, cls} & set(only):
            continue
        signal.alarm(SECONDS_A_MODEL)
        try:
            row = compare.row(model_type, cls)
        except zoo.NotTiny as error:
            not_tiny[f"{model_type} {cls}"] = str(error)
            continue
        finally:
            signal.alarm(0)
        found.append(row)
        print("differs" if row["mismatch"] else "same", model_type, cls, *row["mismatch"], flush=True)
    return found, not_tiny


def versions():
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def judge(found, complete):
    """(Sentences with figures, what is wrong)."""
    modern = [row for row in found if row["modern"]]
    shares = {
        "replaced": sum(bool(row["replaced"]) for row in modern) / max(len(modern), 1),
        "fused": sum(row["fused"] for row in modern) / max(len(modern), 1),
    }
    names = " and ".join(f"{name} {version}" for name, version in versions().items())
    figures = [
        f"{len(found)} classes of models were built tiny with {names} and trained for a step, plain and patched: "
        f"{sum(bool(row['mismatch']) for row in found)} differed.",
        f"{len(modern)} of them have an RMSNorm or a rotary function: {shares['replaced']:.1%} of these had modules "
        f"replaced, {shares['fused']:.1%} computed their loss without logits.",
    ]
    wrong = [f"{row['model_type']} {row['class']} differs: {row['mismatch']}" for row in found if row["mismatch"]]
    if complete:
        wrong += [f"only {len(found)} models" for _ in range(len(found) < PROMISED["models"])]
        wrong += [f"only {share:.1%} {name}" for name, share in shares.items() if share < PROMISED[name]]
    return figures, wrong


def page(found, not_tiny, figures):
    left = Counter((reason.partition(": ")[2], reason.partition(": ")[0]) for row in found for reason in row["left"])
    lines = [
        "# Models of transformers", "",
        "Written by `python tools/models.py --output docs/models`; models.json beside it has every figure.", "",
        *figures, "",
        "Loss, logits and every gradient were compared in fp32 (limits 1e-5, 1e-4 and 1e-3 of their size), and every",
        "replaced module in bf16, bit for bit (LayerNorm: all but the order of its sums). Weights were perturbed and",
        "scales set to values that show. A model outside this list is patched the same way, by what its parts compute.",
        "",
        "| model type | class | norm | MLP, experts | rotary | loss |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found:
        cells = [" ".join(_names(row, ops)) or "—" for ops in PARTS.values()]
        loss = "fused" if row["fused"] else "as it was"
        lines.append(f"| {row['model_type']} | {row['class']} | {' | '.join(cells)} | {loss} |")
    lines += ["", "## Left as it was", "", "| class | why |", "|---|---|"]
    lines += [f"| {cls} | {why} |" for (why, cls) in sorted(left)]
    lines += ["", "## Not compared", "", "No tiny model of these that learns was made:", ""]
    lines += [f"- {name}: {why}" for name, why in sorted(not_tiny.items())]
    return "\n".join(lines) + "\n"


def _names(row, ops):
    """The ops of one part, with the number of modules each serves."""
    counts = {}
    for what, count in row["replaced"].items():
        op = what.partition("(")[0]
        if any(op.endswith(wanted) for wanted in ops):
            counts[op] = counts.get(op, 0) + count
    return [f"{op} x{count}" for op, count in counts.items()]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

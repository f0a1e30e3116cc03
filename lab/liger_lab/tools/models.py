"""Compare every language model of transformers, tiny, with its patched copy.

    python -m liger_lab.tools.models --output docs/models

writes docs/models.json, every figure, and docs/models.md, a page for readers. It fails if a model differs from its
unpatched copy, or if fewer models than PROMISED are served.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "transformers")]
SECONDS_A_MODEL = 120
PROMISED = {"models": 220, "replaced": 0.99, "fused": 0.98}
PARTS = {"norm": ("rms_norm", "layer_norm", "l2_norm"), "mlp": ("swiglu", "geglu", "activate"), "rotary": ("rope",)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, metavar="PATH", help="write PATH.json and PATH.md")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="only these model types or classes")
    arguments = parser.parse_args()
    compared, not_tiny = sweep(arguments.only)
    figures, errors = judge(compared, complete=not arguments.only)
    print("\n".join(figures))
    if arguments.output:
        arguments.output.parent.mkdir(exist_ok=True)
        everything = {"versions": versions(), "models": compared, "not_tiny": not_tiny}
        arguments.output.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(page(compared, not_tiny, figures))
    sys.exit("\n".join(errors) if errors else 0)


def sweep(only=None):
    import compare
    import zoo

    def time_out(*_):
        raise zoo.NotTiny(f"takes more than {SECONDS_A_MODEL} s")

    signal.signal(signal.SIGALRM, time_out)
    zoo.transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    compared, not_tiny = [], {}
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
        compared.append(row)
        print("differs" if row["mismatch"] else "same", model_type, cls, *row["mismatch"], flush=True)
    return compared, not_tiny


def versions():
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def judge(compared, complete):
    """Return sentences with figures, and a list of errors."""
    modern = [row for row in compared if row["modern"]]
    shares = {
        "replaced": sum(bool(row["replaced"]) for row in modern) / max(len(modern), 1),
        "fused": sum(row["fused"] for row in modern) / max(len(modern), 1),
    }
    names = " and ".join(f"{name} {version}" for name, version in versions().items())
    figures = [
        f"{len(compared)} classes of models were built tiny with {names} and trained for a step, plain and patched: "
        f"{sum(bool(row['mismatch']) for row in compared)} differed.",
        f"{len(modern)} of them have an RMSNorm or a rotary function: {shares['replaced']:.1%} of these had modules "
        f"replaced, {shares['fused']:.1%} computed their loss without logits.",
    ]
    errors = [f"{row['model_type']} {row['class']} differs: {row['mismatch']}" for row in compared if row["mismatch"]]
    if complete:
        errors += [f"only {len(compared)} models" for _ in range(len(compared) < PROMISED["models"])]
        errors += [f"only {share:.1%} {name}" for name, share in shares.items() if share < PROMISED[name]]
    return figures, errors


def page(compared, not_tiny, figures):
    left = Counter((reason.partition(": ")[2], reason.partition(": ")[0]) for row in compared for reason in row["left"])
    lines = [
        "# Models of transformers", "",
        "`python -m liger_lab.tools.models --output docs/models` writes this page; models.json has every figure.", "",
        *figures, "",
        "Loss, logits and every gradient were compared in fp32 (limits 1e-5, 1e-4 and 1e-3 of their size), and every",
        "replaced module in bf16, bit for bit (LayerNorm: up to the order of its sums). Weights and scales had values",
        "that show a missing factor. `patch` treats models outside this list the same way: by what parts compute.",
        "",
        "| model type | class | norm | MLP, experts | rotary | loss |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in compared:
        cells = [" ".join(_names(row, ops)) or "—" for ops in PARTS.values()]
        loss = "fused" if row["fused"] else "unchanged"
        lines.append(f"| {row['model_type']} | {row['class']} | {' | '.join(cells)} | {loss} |")
    lines += ["", "## Left unchanged", "", "| class | why |", "|---|---|"]
    lines += [f"| {cls} | {why} |" for (why, cls) in sorted(left)]
    lines += ["", "## Not compared", "", "These have no tiny model that trains:", ""]
    lines += [f"- {name}: {why}" for name, why in sorted(not_tiny.items())]
    return "\n".join(lines) + "\n"


def _names(row, ops):
    """List the ops of one part with the number of modules of each."""
    counts = {}
    for served, count in row["replaced"].items():
        op = served.partition("(")[0]
        if any(op.endswith(name) for name in ops):
            counts[op] = counts.get(op, 0) + count
    return [f"{op} x{count}" for op, count in counts.items()]


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

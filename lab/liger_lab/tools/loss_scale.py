"""Tabulate the errors of every op and loss in 16 bits under loss scales.

    python -m liger_lab.tools.loss_scale --report lab/results/loss-scale-h200  # writes .json and .md; on an accelerator
    TRITON_INTERPRET=1 python -m liger_lab.tools.loss_scale rms_norm jsd  # some, in the interpreter

A figure is the largest error of a gradient as a share of the error that the parity rule allows: twice that of plain
torch in the same dtype plus one rounding, both against float64. Above 1 is a failure. The losses are those of
tests/losses/test_loss_scale.py. The ops run the small cases of tests/kernels/test_incoming_gradients.py; their incoming
gradients are normal values times the scale over 2^20.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("losses", "kernels"))]


def checks(names):
    """Return (kind, name, dtype, function) of each check.

    The function takes a backend and a device, and returns the share at each scale.
    """
    import test_incoming_gradients as ops
    import test_loss_scale as losses

    from liger_hw.dispatch import OPS
    from liger_lab.cases import DIFFERENTIABLE

    def op_subject(name, dtype):
        scales = [scale / ops.ITEMS for scale in losses.SCALES]
        return lambda backend, device: [ops.check(OPS[name], scale, dtype, backend, device) for scale in scales]

    def loss_subject(name, dtype):
        return lambda backend, device: losses.check(name, backend, device, dtype)

    kinds = ("op", DIFFERENTIABLE, op_subject), ("loss", losses.LOSSES, loss_subject)
    return losses.SCALES, [
        (kind, name, dtype, make(name, dtype))
        for kind, all_names, make in kinds
        for name in all_names
        if not names or name in names
        for dtype in losses.DTYPES
    ]


def table(scales, rows):
    """Return the rows as Markdown."""
    lines = ["| | name | dtype | " + " | ".join(f"scale 2^{int(scale).bit_length() - 1}" for scale in scales) + " |"]
    lines.append("|---" * (3 + len(scales)) + "|")
    for row in rows:
        shares = [f"{share:.2f}" for share in row["shares"]] or [row["error"], *[""] * (len(scales) - 1)]
        lines.append(f"| {row['kind']} | {row['name']} | {row['dtype']} | " + " | ".join(shares) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ops and losses (all)")
    parser.add_argument("--report", type=Path, metavar="PATH", help="write PATH.json and PATH.md")
    arguments = parser.parse_args()

    from liger_hw._triton import interpreting
    from liger_hw.backends import detected

    here = torch.device("cpu") if interpreting() else torch.accelerator.current_accelerator(check_available=True)
    if here is None:
        parser.error("torch finds no accelerator here; TRITON_INTERPRET=1 runs the kernels on the CPU, small")
    backend = "nvidia" if interpreting() else detected(torch.device(here.type, 0)).vendor
    scales, jobs = checks(arguments.names)
    rows, shown = [], time.monotonic()
    for kind, name, dtype, check in jobs:
        row = {"kind": kind, "name": name, "dtype": str(dtype).removeprefix("torch."), "shares": [], "error": None}
        try:
            row["shares"] = check(backend, here.type)
        except AssertionError as error:
            row["error"] = str(error).splitlines()[0]
            print(f"FAILS {row['error']}", flush=True)
        rows.append(row)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{len(rows)} of {len(jobs)}", flush=True)
    name = torch.cuda.get_device_name() if here.type == "cuda" else f"{here.type}, interpreted as {backend}"
    about = {"device": name, "torch": torch.__version__, "scales": scales}
    rule = __doc__.split("\n\n")[2].strip()
    page = f"{name}, torch {torch.__version__}.\n\n{rule}\n\n{table(scales, rows)}"
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.with_suffix(".json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        arguments.report.with_suffix(".md").write_text(page)
    print(page)
    wrong = [row for row in rows if row["error"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} within the rule")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

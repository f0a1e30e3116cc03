"""Train mini models of liger-kernel's families, unpatched and patched, and compare them.

    python -m liger_lab.tools.converge --report lab/results/converge-h100
    python -m liger_lab.tools.converge llama gemma2  # some model types

Each model trains 32 steps by AdamW on one batch, in fp32 and in bf16: unpatched; unpatched with every weight moved by
one rounding at the start; patched; and patched with `skip_logits=False`. A model of a configuration with an attention
dropout trains with it, too. The losses of every step, the log-probabilities of the 20 likeliest tokens after the last
one, and the weights of a patched model may differ from the unpatched one's by `ROOM` times what the moved weights
changed, plus a share of their own size (`FLOOR`). Models see text alone. Writes a JSON and a Markdown table.
"""

import argparse
import copy
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "transformers")]

STEPS, LIKELIEST, ROOM = 32, 20, 8
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
READ = """Each training was compared with the unpatched model's: the losses of all steps, the last log-probabilities and
the weights. A share of 1 is the difference that it allows: 8 times what moving every weight by one
rounding changes.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def families():
    """Return (model type, class name) of the families, from transformers' auto classes."""
    import zoo

    from liger_hw.transformers.families import FAMILIES, MODEL_TYPES

    return [(model_type, cls) for model_type, cls in zoo.rows() if model_type in {*FAMILIES, *MODEL_TYPES}]


def train(model, inputs, **more):
    """Train `model`; return its losses, last log-probabilities and weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)  # dropout's
        loss = model(**copy.deepcopy(inputs), **more).loss.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    with torch.no_grad():
        logits = model.eval()(**copy.deepcopy(inputs)).logits
    return {
        "losses": torch.stack(losses).cpu(),
        "log-probabilities": logits.float().log_softmax(-1).cpu(),
        "weights": torch.cat([p.detach().float().flatten().cpu() for p in model.parameters()]),
    }


def distances(results, expected):
    """Return how far apart two trainings are in losses, likely tokens and weights."""
    likeliest = expected["log-probabilities"].topk(LIKELIEST).indices
    tokens = (r["log-probabilities"].gather(-1, likeliest) for r in (results, expected))
    return {
        "losses": _largest(results["losses"] - expected["losses"]),
        "log-probabilities": _largest(torch.sub(*tokens)),
        "weights": (results["weights"] - expected["weights"]).norm().item(),
    }


def _largest(x):
    return x.abs().max().item() if x.isfinite().all() else float("inf")


def compare(model_type, cls, dtype, device, dropout=0.0, patch=None):
    """Return one row of the result; a share above 1 in "shares" is a difference.

    Args:
        dtype: a key of `DTYPES`.
        dropout: of attention; None of it where the configuration has no such entry.
        patch: in place of `liger_hw.patch`, for a test that plants a mistake.
    """
    import alike
    import zoo

    import liger_hw

    row = {"model": model_type, "class": cls, "dtype": dtype, "dropout": dropout}
    try:
        plain, inputs = zoo.build(model_type, cls)
    except zoo.NotTiny as error:
        return row | {"skipped": str(error)}
    plain = plain.to(device, DTYPES[dtype])
    for part in plain.modules():  # modules read it there, or keep their own
        for owner in (part, getattr(part, "config", None)):
            if dropout and type(getattr(owner, "attention_dropout", None)) is float:
                owner.attention_dropout = dropout
    inputs = {n: x.to(device) if torch.is_tensor(x) else x for n, x in inputs.items()}
    inputs = {n: x.to(DTYPES[dtype]) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in inputs.items()}
    moved, patched = copy.deepcopy(plain), copy.deepcopy(plain)
    (patch or liger_hw.patch)(patched)
    with_logits = copy.deepcopy(patched)
    _move(moved, alike.EPS if dtype == "fp32" else torch.finfo(torch.bfloat16).eps / 2)
    expected = train(plain, inputs)
    yard = distances(train(moved, inputs), expected)
    sizes = {"losses": expected["losses"].abs().max().item(), "log-probabilities": 1.0,
             "weights": expected["weights"].norm().item()}  # fmt: skip
    allowed = {name: ROOM * yard[name] + FLOOR[DTYPES[dtype]] * sizes[name] for name in yard}
    shares = {}
    for how, model, more in (("without logits", patched, {}), ("with logits", with_logits, {"skip_logits": False})):
        differences = distances(train(model, inputs, **more), expected)
        shares[how] = {name: difference / allowed[name] for name, difference in differences.items()}
    return row | {"shares": shares, "first loss": expected["losses"][0].item(),
                  "last loss": expected["losses"][-1].item(), "moved": yard}  # fmt: skip


def _move(model, eps):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            signs = torch.randint(0, 2, p.shape, generator=generator).to(p.device) * 2 - 1
            p.copy_((p.double() * (1 + 2 * eps * signs)).to(p.dtype))


def worst(row):
    """Return the largest share of what is allowed; 0 where the model was left out."""
    return max((share for of in row.get("shares", {}).values() for share in of.values()), default=0.0)


def table(rows):
    """Return the rows as Markdown."""
    lines = ["| model | dtype | attention dropout | loss | worst share of what is allowed: without logits, with |",
             "|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        name = f"{row['model']} ({row['class']})"
        if "shares" not in row:
            lines.append(f"| {name} | {row['dtype']} | {row['dropout']} | | {row.get('skipped') or row['error']} |")
            continue
        shares = ", ".join(f"{max(of.values()):.2f}" for of in row["shares"].values())
        losses = f"{row['first loss']:.3f} to {row['last loss']:.3f}"
        lines.append(f"| {name} | {row['dtype']} | {row['dropout']} | {losses} | {shares} |")
    return "\n".join(lines) + "\n"


def _work(job):
    torch.set_num_threads(1)
    try:
        return compare(*job)
    except Exception as error:  # of any kind: a row of the result
        model_type, cls, dtype, _, dropout = job
        row = {"model": model_type, "class": cls, "dtype": dtype, "dropout": dropout}
        return row | {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="model types (all)")
    parser.add_argument("--jobs", type=int, default=6, help="processes (6)")
    parser.add_argument("--report", type=Path, default=ROOT / "report" / "converge", help="the files, without ending")
    args = parser.parse_args()
    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    chosen = [(m, c) for m, c in families() if not args.models or m in args.models]
    jobs = [(m, c, dtype, device, 0.0) for m, c in chosen for dtype in DTYPES]
    jobs += [(m, c, "fp32", device, 0.1) for m, c in chosen if c.endswith("ForCausalLM")]
    begin, shown, rows = time.monotonic(), time.monotonic(), []
    pool = ProcessPoolExecutor(args.jobs, get_context("spawn"))
    try:
        for done in as_completed([pool.submit(_work, job) for job in jobs]):
            rows.append(done.result())
            row = rows[-1]
            if "error" in row or worst(row) > 1:
                print(f"{row['model']} {row['dtype']}: {row.get('error') or row['shares']}", flush=True)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"{len(rows)}/{len(jobs)} in {shown - begin:.0f} s", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {len(rows)} of {len(jobs)}")
    finally:
        pool.shutdown(cancel_futures=True)
    rows.sort(key=lambda row: (row["model"], row["class"], row["dtype"], row["dropout"]))
    wrong = [row for row in rows if "error" in row or worst(row) > 1]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else str(device)
    about = {"device": name, "torch": torch.__version__, "steps": STEPS, "complete": len(rows) == len(jobs)}
    args.report.with_suffix(".json").write_text(json.dumps(about | {"rows": rows}, indent=1))
    head = f"{name}, torch {torch.__version__}, {STEPS} steps, {len(rows)} of {len(jobs)} trainings\n\n{READ}\n"
    args.report.with_suffix(".md").write_text(head + table(rows))
    trained = sum("shares" in row for row in rows)
    print(
        f"{trained} trainings compared, {len(wrong)} differ, {len(rows) - trained} left out or failed: {args.report}.md"
    )
    if len(rows) < len(jobs):
        return 130
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measure what `counted_rows` saves in each loss, for docs/losses.md.

    python -m liger_lab.tools.counted_rows run lab/results/h100-counted-rows.json [--tiny]
    python -m liger_lab.tools.counted_rows table lab/results/h100-counted-rows.json

A call is the forward and backward of one loss in bf16, with the first part of each sequence masked, as prompts are. The
file also has the cost of token accuracy and entropy beside the cross entropy, and the largest distance of a gradient
with the number from that without it, relative to its norm.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

import liger_hw
from liger_lab.bench.formatting import number
from liger_lab.bench.measure import Clock
from liger_lab.bench.operations import clean
from liger_lab.bench.run_file import environment, write
from liger_lab.tools.readme import insert, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "losses.md"
REAL = {"sequences": 8, "length": 1024, "hidden": 4096, "vocabulary": 128256}
TINY = {"sequences": 4, "length": 16, "hidden": 32, "vocabulary": 300}
MASKED = (0.25, 0.5, 0.75)
SECONDS = 1.5  # the aim for all rounds of one loss at one share; a loss takes 11 rounds at least


class HeadTensors:
    """Hold a head, another model's, and labels whose first part `mask` masks."""

    def __init__(self, sizes, device):
        generator = torch.Generator(device).manual_seed(0)
        shape = sizes["sequences"], sizes["length"]

        def normal(*size, scale=1.0):
            return (torch.randn(size, generator=generator, device=device) * scale).bfloat16()

        self.x, self.other_x = normal(*shape, sizes["hidden"]), normal(*shape, sizes["hidden"])
        self.weight, self.other_weight = (normal(sizes["vocabulary"], sizes["hidden"], scale=0.02) for _ in range(2))
        self.tokens = torch.randint(sizes["vocabulary"], shape, generator=generator, device=device)
        self.numbers = torch.randn(shape[0], generator=generator, device=device)
        self.top_k = torch.randn((*shape, 64), generator=generator, device=device).log_softmax(-1)
        self.top_tokens = torch.arange(64, device=device).expand(*shape, 64)
        self.leaves = [self.x.requires_grad_(), self.weight.requires_grad_()]
        self.mask(0.0)

    def mask(self, share):
        """Mask the first `share` of each sequence; return the number of rows that count."""
        self.labels = self.tokens.clone()
        self.labels[:, : int(share * self.tokens.shape[1])] = -100
        return int((self.labels != -100).sum())


def cross_entropy(t, **options):
    output = liger_hw.fused_linear_cross_entropy(t.x.flatten(0, 1), t.weight, t.labels.flatten(), **options)
    return output if torch.is_tensor(output) else output.loss


def log_probabilities(t, **options):
    function = liger_hw.fused_linear_selective_log_softmax
    return function(t.x.flatten(0, 1), t.weight, t.labels.flatten(), **options).mean()


def tokens(t, **options):
    return liger_hw.token_loss(lambda p, _: (-p,), t.x.flatten(0, 1), t.weight, t.labels.flatten(), **options)[0]


def pairs(t, **options):
    reference = {"ref_x": t.other_x, "ref_weight": t.other_weight}
    return liger_hw.preference_loss(t.x, t.weight, t.labels, average_log_prob=True, **reference, **options).loss


def answers(t, **options):
    reference = {"ref_x": t.other_x, "ref_weight": t.other_weight, "average_log_prob": True}
    return liger_hw.unpaired_preference_loss(t.x, t.weight, t.labels, t.numbers > 0, **reference, **options).loss


def policy(t, **options):
    mask, completions = t.labels != -100, t.labels.clamp(min=0)
    return liger_hw.policy_loss(t.x, t.weight, completions, t.numbers, mask, beta=0.0, **options).loss


def teacher(t, **options):
    return liger_hw.distillation_loss(t.x, t.weight, t.other_x, t.other_weight, t.labels, **options).loss


def stored(t, **options):
    given = t.top_k, t.top_tokens
    return liger_hw.offline_distillation_loss(t.x, t.weight, *given, labels=t.labels, **options)


def multi_token(t, **options):
    return liger_hw.multi_token_loss(torch.stack((t.x, t.other_x)), t.weight, t.labels, **options).loss


LOSSES = {
    "`fused_linear_cross_entropy`": cross_entropy,
    "`fused_linear_selective_log_softmax`": log_probabilities,
    "`token_loss`": tokens,
    "`policy_loss`": policy,
    '`policy_loss`, `importance_sampling_level="sequence"`': partial(policy, importance_sampling_level="sequence"),
    "`preference_loss`, reference model": pairs,
    "`unpaired_preference_loss`, reference model": answers,
    "`distillation_loss`": teacher,
    "`offline_distillation_loss`, top 64": stored,
    "`multi_token_loss`, 2 heads": multi_token,
}
BESIDE = {
    "neither": {}, "token accuracy": {"return_token_accuracy": True}, "entropy": {"return_entropy": True},
    "both": {"return_token_accuracy": True, "return_entropy": True},
}  # fmt: skip


def step(loss, tensors, options):
    return torch.autograd.grad(loss(tensors, **options), tensors.leaves)


def distance(loss, tensors, rows):
    """Return the largest distance of a gradient with the number of rows from that without."""
    gradients = zip(step(loss, tensors, {"counted_rows": rows}), step(loss, tensors, {}))
    return max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in gradients)


def milliseconds(clock, calls, on_cpu):
    taken = clock.interleave(calls, 0 if on_cpu else SECONDS)
    return {name: seconds["median"] * 1e3 for name, seconds in taken.items()}


def measure(file: Path, sizes) -> None:
    """Measure every loss at every share, and write the file."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    measured = environment(device) | {"sizes": sizes, "results": []}
    measured["command"] = "python -m liger_lab.tools.counted_rows run ..."
    clock, tensors, on_cpu = Clock(device), HeadTensors(sizes, device), device.type == "cpu"
    calls = {name: partial(step, cross_entropy, tensors, options) for name, options in BESIDE.items()}
    measured["beside_cross_entropy_ms"] = milliseconds(clock, calls, on_cpu)
    for name, loss in LOSSES.items():
        for share in MASKED:
            rows = tensors.mask(share)
            record = {"loss": name, "masked": share, "distance": distance(loss, tensors, rows)}
            calls = {"ms": partial(step, loss, tensors, {})}
            calls["counted_ms"] = partial(step, loss, tensors, {"counted_rows": rows})
            measured["results"].append(record | milliseconds(clock, calls, on_cpu))
            write(measured, file)
            clean(device)


def table(measured: dict) -> str:
    """Return the table of a measured file."""
    header = ["loss", *(f"{share:.0%} masked: without, with the number" for share in MASKED)]
    lines = []
    for name in LOSSES:
        line = [name]
        for share in MASKED:
            (r,) = (r for r in measured["results"] if (r["loss"], r["masked"]) == (name, share))
            times = f"{number(r['ms'])} ms, {number(r['counted_ms'])} ms"
            line.append(f"{times}: {r['counted_ms'] / r['ms']:.2f}x")
        lines.append(line)
    device, versions, sizes = measured["device"], measured["versions"], measured["sizes"]
    most = max(r["distance"] for r in measured["results"])
    lead = (
        f"{device['name']}, {measured['date']}, torch {versions['torch']}, triton {versions['triton']}. "
        f"{sizes['sequences']} sequences of {sizes['length']:,} tokens, {sizes['hidden']:,} features, "
        f"{sizes['vocabulary']:,} columns, bf16; forward and backward, medians. Gradients with the number differed "
        f"from those without it by at most {most:.1e} of their norm."
    )
    return f"{lead}\n\n{markdown(header, lines)}"


def main(arguments) -> None:
    command, file = (arguments + ["", ""])[:2]
    if command == "run" and file:
        return measure(Path(file), TINY if "--tiny" in arguments else REAL)
    if command == "table" and file:
        return insert(PAGE, table(json.loads(Path(file).read_text())), "liger_lab.tools.counted_rows")
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

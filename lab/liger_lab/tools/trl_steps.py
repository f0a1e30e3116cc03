"""Measure steps of TRL's trainers with several heads, and write the table of docs/trainers.md.

    python -m liger_lab.tools.trl_steps run lab/results/trl-h100.json [--tiny]
    python -m liger_lab.tools.trl_steps table lab/results/trl-h100.json

A step is TRL's own `compute_loss` of a Llama of two layers, and its backward. Only the function that TRL calls for
log-probabilities changes, and for "liger_hw, patched" the layers; liger-kernel's losses read the same hidden states.
Errors are distances from the step whose
head computes in fp64: of the loss, and of the gradients of head and hidden states, relative to their norms. Needs TRL
1.16 or newer.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional as F

import liger_hw
from liger_hw.integrations import accelerate_trl, restore_trl
from liger_hw.integrations.trl import FUNCTION, original_function
from liger_lab.bench import memory
from liger_lab.bench.formatting import number
from liger_lab.bench.measure import Clock
from liger_lab.bench.operations import clean
from liger_lab.bench.run_file import environment, write
from liger_lab.tools.readme import insert, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "trainers.md"
REAL = {"hidden": 2048, "vocabulary": 128256, "sequences": 8, "length": 1024}
TINY = {"hidden": 64, "vocabulary": 300, "sequences": 4, "length": 24}
EXACT, PLAIN, TRL, OURS, LIGER, BODY = "fp64", "plain", "TRL", "liger_hw", "liger-kernel", "body"
PATCHED, FP32_SUM = "liger_hw, patched", "liger_hw, accum_dtype=torch.float32"
SECONDS = 8.0  # the aim for all rounds of one trainer
BETA = 0.1


class WholeLogits:
    """Serve in place of TRL's function, on whole logits, by autograd."""

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs):
        logits = F.linear(hidden, weight)
        log_p = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        chosen = log_p.gather(-1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1) if "entropy" in outputs else None
        return chosen, entropy, None, logits.detach().mean(-1), chosen >= log_p.amax(-1)


class Watched:
    """Call a function of (hidden, weight, ...); keep the two, whose gradients a backward leaves.

    Args:
        dtype: to which they are cast first.
    """

    def __init__(self, function, dtype=None):
        self.function, self.dtype, self.inputs = function, dtype, ()

    def apply(self, hidden, weight, *others):
        hidden, weight = (x.to(self.dtype or x.dtype) for x in (hidden, weight))
        if hidden.requires_grad:
            self.inputs = hidden, weight
            for x in self.inputs:
                x.retain_grad()
        return self.function(hidden, weight, *others)


def build(sizes, device):
    """Build the model of two layers, with random weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["hidden"], intermediate_size=4 * sizes["hidden"],
        num_hidden_layers=2, num_attention_heads=sizes["hidden"] // 64, num_key_value_heads=sizes["hidden"] // 64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype_on(device))


def dtype_on(device):
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, "<unk>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def settings(device):
    """Return the arguments that the trainers' configurations share."""
    return {
        "output_dir": tempfile.mkdtemp(), "report_to": [], "bf16": False, "gradient_checkpointing": False,
        "use_cpu": device.type == "cpu", "disable_tqdm": True,
    }  # fmt: skip


def rows(**row):
    """Return a trainer's data, which no step reads."""
    from datasets import Dataset

    return {"train_dataset": Dataset.from_list([row] * 16), "processing_class": tokenizer()}


def sft(model, tokens, build_another):
    """Return (trainer, batch, liger-kernel's loss of the answers' hidden states); also `dpo` and `grpo`."""
    from trl import SFTConfig, SFTTrainer

    trainer = SFTTrainer(model, SFTConfig(**settings(tokens.device)), **rows(input_ids=[4, 5, 6]))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels_of(tokens)}

    def peer(hidden, weight):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss()(weight, hidden.flatten(0, 1), answers(tokens).flatten())

    return trainer, batch, peer


def dpo(model, tokens, build_another):
    from trl import DPOConfig, DPOTrainer

    reference = build_another()
    configuration = DPOConfig(**settings(tokens.device), beta=BETA)
    trainer = DPOTrainer(model, reference, configuration, **rows(prompt="a", chosen="b", rejected="c"))
    mask = torch.ones_like(tokens)
    counted = (labels_of(tokens) != -100).long()
    batch = {"input_ids": tokens, "attention_mask": mask, "completion_mask": counted}

    def peer(hidden, weight):
        from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss

        with torch.no_grad():
            ref = answers_states(reference, tokens)
        loss = LigerFusedLinearDPOLoss(beta=BETA)
        return loss(weight, hidden, answers(tokens), None, ref, reference.lm_head.weight)[0]

    return trainer, batch, peer


def grpo(model, tokens, build_another):
    from trl import GRPOConfig, GRPOTrainer

    options = settings(tokens.device) | {"loss_type": "grpo", "num_generations": 2, "per_device_train_batch_size": 2}
    reward = partial(lambda completions, **_: [0.0] * len(completions))
    trainer = GRPOTrainer(model, reward, GRPOConfig(**options), **rows(prompt="a"))
    trainer.current_gradient_accumulation_steps = 1  # as `train` sets it
    prompt, ones = tokens.shape[1] - answers(tokens).shape[1], torch.ones_like(tokens)
    with torch.no_grad():
        old, *_ = trainer._get_per_token_logps_and_entropies(model, tokens, ones, answers(tokens).shape[1])
    old += 0.1 * torch.randn_like(old)  # of a sampler some steps ago
    advantages = torch.randn(len(tokens), device=tokens.device)
    batch = {
        "prompt_ids": tokens[:, :prompt], "prompt_mask": ones[:, :prompt], "completion_ids": answers(tokens),
        "completion_mask": ones[:, prompt:], "advantages": advantages, "old_per_token_logps": old,
    }  # fmt: skip

    def peer(hidden, weight):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")
        mask = ones[:, prompt:]
        return loss(hidden, weight, answers(tokens), mask, advantages, old_per_token_logps=old)[0]

    return trainer, batch, peer


TRAINERS = {"SFT": sft, "DPO": dpo, "GRPO": grpo}


def answers(tokens):
    """Return the last three quarters of each sequence, which the losses predict."""
    return tokens[:, tokens.shape[1] // 4 :]


def labels_of(tokens):
    labels = tokens.clone()
    labels[:, : tokens.shape[1] // 4] = -100
    return labels


def answers_states(model, tokens):
    """Return the hidden states that predict the answers."""
    states = model.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    return states.last_hidden_state[:, tokens.shape[1] // 4 - 1 : -1]


class Steps:
    """The steps of one trainer.

    Attributes:
        heads: provider -> object whose `apply` computes its log-probabilities or, for liger-kernel, its loss.
    """

    def __init__(self, name, sizes, device, patched=False):
        torch.manual_seed(0)
        self.model = build(sizes, device)
        if patched:
            liger_hw.patch(self.model)
        self.tokens = torch.randint(4, sizes["vocabulary"], (sizes["sequences"], sizes["length"]), device=device)
        self.trainer, self.batch, peer = TRAINERS[name](self.model, self.tokens, partial(build, sizes, device))
        self.model.train()
        self.module, original = original_function()
        accelerate_trl()
        self.heads = {PLAIN: WholeLogits, TRL: original, OURS: getattr(self.module, FUNCTION)}
        accelerate_trl(accum_dtype=torch.float32)
        self.heads[FP32_SUM] = getattr(self.module, FUNCTION)
        self.heads[LIGER] = SimpleNamespace(apply=peer)
        restore_trl()

    def run(self, provider, head=None):
        """Return the loss; leave the gradients."""
        self.model.zero_grad(set_to_none=True)
        head = head or self.heads[provider]
        if provider == LIGER:
            loss = head.apply(answers_states(self.model, self.tokens), self.model.lm_head.weight)
        else:
            setattr(self.module, FUNCTION, head)
            loss = self.trainer.compute_loss(self.model, dict(self.batch))
            restore_trl()
        loss.backward()
        return loss.detach()

    def run_body(self):
        self.model.zero_grad(set_to_none=True)
        states = answers_states(self.model, self.tokens)
        states.backward(torch.ones_like(states))
        if reference := getattr(self.trainer, "ref_model", None):
            with torch.no_grad():
                answers_states(reference, self.tokens)

    def numbers(self, provider, dtype=None):
        """Return the loss, and the gradients of hidden states and head."""
        head = Watched(self.heads[provider].apply, dtype)
        loss = self.run(provider, head)
        hidden, weight = (x.grad for x in head.inputs)
        return loss, hidden.flatten(0, -2), weight

    def errors(self, provider, exact):
        """Return each number's distance from `exact`, relative to it."""
        values = self.numbers(provider)
        distances = [((value.double() - e).norm() / e.norm()).item() for value, e in zip(values, exact)]
        return dict(zip(("loss_error", "dx_error", "dw_error"), distances)) | {"loss": values[0].item()}


def measure(file: Path, sizes) -> None:
    """Measure every trainer with every head, and write the file."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    measured = environment(device) | {"sizes": sizes, "results": []}
    measured["command"] = "python -m liger_lab.tools.trl_steps run ..."
    clock = Clock(device)
    for name in TRAINERS:
        steps = Steps(name, sizes, device)
        gradients = sum(p.nbytes for p in steps.model.parameters())
        exact = [value.double() for value in steps.numbers(PLAIN, torch.float64)]
        subjects = {provider: (steps, provider) for provider in steps.heads}
        subjects[PATCHED] = Steps(name, sizes, device, patched=True), OURS
        records, calls = {}, {BODY: steps.run_body}
        for provider, (subject, head) in subjects.items():
            clean(device)
            try:
                records[provider] = subject.errors(head, exact)
                call = partial(subject.run, head)
                subject.model.zero_grad(set_to_none=True)
                records[provider]["peak_bytes"] = memory.peak(call, device) - gradients
                calls[provider] = call
            except Exception as error:  # a peer may be absent or fail; the others still run
                records[provider] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            subject.model.zero_grad(set_to_none=True)
        del exact
        clean(device)
        for provider, taken in clock.interleave(calls, SECONDS if device.type != "cpu" else 0).items():
            times = {key: value * 1e3 for key, value in taken.items() if key != "rounds"}
            records.setdefault(provider, {}).update(times)
        measured["results"] += [{"trainer": name, "provider": p} | record for p, record in records.items()]
        write(measured, file)
        del steps, subjects, subject, calls, call
        clean(device)


HEADER = ["trainer", "head", "step", "head's part", "memory beside the gradients", "loss", "error of the loss",
          "of hidden states' gradient", "of the head's gradient"]  # fmt: skip


def table(measured: dict) -> str:
    """Return the table of a measured file."""
    lines = []
    for name in TRAINERS:
        records = {r["provider"]: r for r in measured["results"] if r["trainer"] == name}
        body = records.pop(BODY)["median"]
        for provider, r in records.items():
            if "error" in r:
                lines.append([name, provider, "fails", *[""] * (len(HEADER) - 3)])
                continue
            times = [f"{number(r['median'])} ms", f"{number(r['median'] - body)} ms"]
            errors = [f"{r[f'{which}_error']:.1e}" for which in ("loss", "dx", "dw")]
            if provider == PATCHED:  # its layers have other times and roundings than those of fp64's step
                times[1], *errors = "", "", "", ""
            space = f"{r['peak_bytes'] / 2**30:.2f} GiB"
            lines.append([name, provider, *times, space, f"{r['loss']:.5f}", *errors])
    device, versions, sizes = measured["device"], measured["versions"], measured["sizes"]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    lead = (
        f"{device['name']}, {measured['date']}. {packages}. {sizes['sequences']} sequences of {sizes['length']:,} "
        f"tokens, {sizes['hidden']:,} features, {sizes['vocabulary']:,} columns, bf16."
    )
    return f"{lead}\n\n{markdown(HEADER, lines)}"


def main(arguments) -> None:
    command, file = (arguments + ["", ""])[:2]
    if command == "run" and file:
        return measure(Path(file), TINY if "--tiny" in arguments else REAL)
    if command == "table" and file:
        return insert(PAGE, table(json.loads(Path(file).read_text())), "liger_lab.tools.trl_steps")
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])

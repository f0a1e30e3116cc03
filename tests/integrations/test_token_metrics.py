"""Token accuracy and entropy in the logs of a Trainer: those of the logits, and no other loss."""

import functools
import os

import pytest
import torch

pytest.importorskip("accelerate", reason="the package accelerate is not installed")
import tiny  # noqa: E402
from test_trainer_matrix import accuracy, adapted, smoothed, translator  # noqa: E402

import liger_hw  # noqa: E402
from liger_hw.integrations import TokenMetrics  # noqa: E402

transformers = tiny.transformers
NAMES = ("token_accuracy", "entropy")
TOKENS = tiny.tokens(8)
TOKENS["labels"][:, 9::2] = tiny.model()(TOKENS["input_ids"]).logits.argmax(-1)[:, 8:-1:2]  # right before training
ROWS = [dict(zip(TOKENS, row)) for row in zip(*TOKENS.values())]


class Metered(TokenMetrics, transformers.Trainer):
    pass


class MeteredSeq2Seq(TokenMetrics, transformers.Seq2SeqTrainer):
    pass


class OfLogits:
    """A mixin that keeps the same numbers of each batch, from its logits."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        labels, logits = inputs["labels"][:, 1:], outputs.logits.detach()[:, :-1]
        counts, log_p = labels != -100, logits.double().log_softmax(-1)
        right, entropy = (logits.argmax(-1) == labels)[counts], -(log_p.exp() * log_p).sum(-1)[counts]
        self.batches.setdefault(model.training, []).append((right.double(), entropy))
        return (loss, outputs) if return_outputs else loss

    def means(self, training, first=0, last=None):
        batches = self.batches[training][first:last]
        return [torch.cat(rows).mean().item() for rows in zip(*batches)]


class Plain(OfLogits, transformers.Trainer):
    pass


class PlainSeq2Seq(OfLogits, transformers.Seq2SeqTrainer):
    pass


def build(folder, kind, patched=True, model=None, arguments=transformers.TrainingArguments, **options):
    for name in [name for name in os.environ if name.startswith("ACCELERATE_DYNAMO")]:
        del os.environ[name]  # older versions of transformers leave the settings of the last compiled trainer there
    model, more = model or tiny.model(), options.pop("trainer", {})
    if patched:
        liger_hw.patch(model)
    settings = {
        "max_steps": 4, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "logging_steps": 2,
        "report_to": [], "use_cpu": True, "seed": 0, "save_strategy": "no", "disable_tqdm": True, "optim": "sgd",
        "learning_rate": 0.1,
    }  # fmt: skip
    trainer = kind(model, arguments(str(folder), **settings | options), train_dataset=ROWS, eval_dataset=ROWS, **more)
    trainer.batches = {}
    return trainer


def logged(trainer, names=("loss", *NAMES)):
    return [[log.get(name) for name in names] for log in trainer.state.log_history if "loss" in log]


OPTIONS = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "recomputed": {"gradient_checkpointing": True},
    "metrics": {"trainer": {"compute_metrics": accuracy}},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1},
    "adapted": {"adapted": True},
    "seq2seq": {"arguments": transformers.Seq2SeqTrainingArguments},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager", "prediction_loss_only": True},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_trainer(option, tmp_path):
    options = dict(OPTIONS[option])
    build_model = adapted if options.pop("adapted", False) else tiny.model
    kinds = (PlainSeq2Seq, MeteredSeq2Seq) if option == "seq2seq" else (Plain, Metered)
    plain_options = {key: value for key, value in options.items() if "compile" not in key}
    plain = build(tmp_path, kinds[0], False, build_model(), **plain_options)
    same = build(tmp_path, kinds[0].__mro__[2], model=build_model(), **options)
    found = build(tmp_path, kinds[1], model=build_model(), **options)
    for trainer in (plain, same, found):
        trainer.train()
    assert any(log["token_accuracy"] for log in found.state.log_history if "loss" in log)
    steps = 2 * options.get("gradient_accumulation_steps", 1)
    expected = [plain.means(True, 0, steps), plain.means(True, steps, 2 * steps)]
    torch.testing.assert_close([row[1:] for row in logged(found)], expected, rtol=1e-5, atol=1e-6)
    assert [row[:1] for row in logged(found)] == logged(same, ("loss",)), "the loss is another"
    for p, q in zip(same.model.parameters(), found.model.parameters()):
        assert torch.equal(p, q)
    if "eval_strategy" in options:
        logs = [log for log in found.state.log_history if "eval_loss" in log]
        expected = plain.means(False, -3)  # three batches an evaluation
        torch.testing.assert_close([logs[-1][f"eval_{name}"] for name in NAMES], expected, rtol=1e-5, atol=1e-6)
    plain.batches.clear()
    expected, metrics = plain.evaluate(), found.evaluate()
    torch.testing.assert_close([metrics[f"eval_{name}"] for name in NAMES], plain.means(False), rtol=1e-5, atol=1e-6)
    assert found.state.log_history[-1]["eval_entropy"] == metrics["eval_entropy"]
    for name in ("eval_loss", "eval_accuracy", "eval_mean"):
        torch.testing.assert_close(metrics.get(name), expected.get(name), rtol=1e-4, atol=1e-6)
    if option != "compiled":
        predicted = found.predict(ROWS)
        assert predicted.predictions.shape == plain.predict(ROWS).predictions.shape
        assert predicted.metrics["test_entropy"] == pytest.approx(metrics["eval_entropy"])


def test_resumed(tmp_path):
    options = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    whole = build(tmp_path, Metered, **options)
    whole.train()
    again = build(tmp_path, Metered, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torch.testing.assert_close(logged(again), logged(whole), rtol=1e-5, atol=1e-6)


def on_rank(folder):
    kind = torch.distributed.get_rank()
    trainer = build(folder, Metered, logging_steps=4)
    trainer.train()
    torch.save([logged(trainer), trainer.evaluate()], folder / str(kind))
    compiled = build(folder, Metered, torch_compile=True, torch_compile_backend="aot_eager")
    with pytest.raises(ValueError, match="not compiled under DDP"):
        compiled.train()


def test_two_ranks_log_the_means_of_both(ranks, tmp_path):
    ranks(2, on_rank, tmp_path)
    one, other = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert one[0] == other[0] and one[1]["eval_entropy"] == other[1]["eval_entropy"]
    expected = build(tmp_path, Metered, logging_steps=4, gradient_accumulation_steps=2)
    expected.train()
    torch.testing.assert_close(one[0], logged(expected), rtol=1e-3, atol=1e-5)


def test_a_loss_that_knows_neither_is_an_error(tmp_path):
    for options, message in (
        ({"patched": False}, "model: got LlamaForCausalLM, allowed: a causal model whose loss is patched"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor: got 0.1, .*'label_smoothing': "),
        ({"trainer": {"compute_loss_func": smoothed}}, "compute_loss_func: got .* takes the labels away"),
        (
            {"model": translator()},
            "return_token_accuracy, return_entropy: .*ForCausalLMLoss|argument 'return_token_accuracy'",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=message):  # older ones of T5 take no further arguments
            build(tmp_path, Metered, **options).train()


def reads(function):
    """Count the operations that would make the host wait for an accelerator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
    return sum(event.count for event in profile.key_averages() if event.key in waits)


def test_a_step_reads_no_more_values_than_the_trainers(tmp_path):
    counts = []
    for kind in (transformers.Trainer, Metered):
        trainer = build(tmp_path, kind)
        batch = next(iter(trainer.get_train_dataloader()))
        step = functools.partial(trainer.compute_loss, trainer.model.train(), batch)
        counts.append(reads(functools.partial(step, num_items_in_batch=torch.tensor(30))))
    assert counts[0] == counts[1]
    assert reads(step().item) == 1

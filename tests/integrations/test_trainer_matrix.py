"""Train, evaluate and predict with each option of a Trainer that touches the loss: results equal the plain model's."""

import functools

import numpy
import pytest
import torch

pytest.importorskip("accelerate", reason="the package accelerate is not installed")
import tiny  # noqa: E402

import liger_hw  # noqa: E402
from liger_hw import integrations  # noqa: E402
from liger_hw.patching import swapping  # noqa: E402

transformers = tiny.transformers
ROWS = [{name: row for name, row in zip(("input_ids", "labels"), pair)} for pair in zip(*tiny.tokens(8).values())]


# Models ---------------------------------------------------------------------------------------------------------------


class WithoutKwargs(transformers.LlamaForCausalLM):
    """A model whose forward takes its arguments by name alone, as remote code does."""

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)


def causal():
    return tiny.model()


def without_kwargs():
    model = tiny.model()
    model.__class__ = WithoutKwargs
    return model


def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_labels=3
    )
    return transformers.BertForSequenceClassification(config)


def masked():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    return transformers.BertForMaskedLM(config)


def translator():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def adapted():
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    return peft.get_peft_model(tiny.model(), config)


# Options --------------------------------------------------------------------------------------------------------------


def smoothed(outputs, labels, num_items_in_batch=None):
    """A loss of the user's own for `compute_loss_func`."""
    logits = outputs.logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.05)


class OwnLoss(transformers.Trainer):
    """A trainer whose `compute_loss` reads the logits beside the model's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 1e-3 * outputs.logits.float().logsumexp(-1).square().mean()
        return (loss, outputs) if return_outputs else loss


class LossOfLogits(transformers.Trainer):
    """A trainer whose `compute_loss` takes the labels away from the model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = smoothed(outputs, labels)
        return (loss, outputs) if return_outputs else loss


def accuracy(prediction, compute_result=True):
    logits, labels = (torch.as_tensor(values) for values in (prediction.predictions, prediction.label_ids))
    return {"accuracy": (logits.argmax(-1) == labels).float().mean().item(), "mean": logits.mean().item()}


def likeliest(logits, labels):
    return logits.argmax(-1)


def share_of_tokens(prediction):
    return {"accuracy": float((prediction.predictions == prediction.label_ids).mean())}


def loss_in_metrics(prediction):
    return {"mean_loss": float(prediction.losses.mean()), "inputs": float(prediction.inputs.sum())}


OPTIONS = {  # arguments of TrainingArguments; "trainer": those of the Trainer itself
    "none": {},
    "prediction_loss_only": {"prediction_loss_only": True},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "compute_loss_func": {"trainer": {"compute_loss_func": smoothed}},
    "compute_loss": {"class": OwnLoss},
    "compute_loss without labels": {"class": LossOfLogits},
    "compute_metrics": {"trainer": {"compute_metrics": accuracy}},
    "batch_eval_metrics": {"trainer": {"compute_metrics": accuracy}, "batch_eval_metrics": True},
    "preprocess_logits_for_metrics": {
        "trainer": {"compute_metrics": share_of_tokens, "preprocess_logits_for_metrics": likeliest}
    },
    "include_for_metrics": {"trainer": {"compute_metrics": loss_in_metrics}, "include_for_metrics": ["inputs", "loss"]},
    "accumulation": {"gradient_accumulation_steps": 2},
    "accumulation, smoothed": {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    "mean of each device": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "neftune": {"neftune_noise_alpha": 5.0},
    "evaluation while training": {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True},
    "eval_accumulation_steps": {"eval_accumulation_steps": 1, "eval_do_concat_batches": False},
    "bf16": {"bf16": True},
    "bf16_full_eval": {"bf16_full_eval": True},
    "label_names": {"label_names": ["labels"]},
}
WAYS = ("flag", "callback", "patch")


def run(folder, way=None, build=causal, rows=ROWS, predicts=True, **arguments):
    """Return the losses and metrics of training and evaluation, and the predictions."""
    arguments = dict(arguments)
    trainer_class, more = arguments.pop("class", transformers.Trainer), arguments.pop("trainer", {})
    model = build()
    if way == "patch":
        liger_hw.patch(model)
    trainer = trainer_class(
        model,
        transformers.TrainingArguments(
            str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=4, logging_steps=1, report_to=[],
            use_cpu=True, seed=0, save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.1,
            use_liger_kernel=way == "flag", **{"max_steps": 2} | arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[integrations.LigerHwCallback()] if way == "callback" else [],
        **more,
    )  # fmt: skip
    trainer.train()
    assert any(map(swapping.is_swapped, model.modules())) == (way is not None)
    evaluated = trainer.evaluate()
    history = [value for log in trainer.state.log_history for name, value in log.items() if counts(name)]
    metrics = [value for name, value in evaluated.items() if counts(name)]
    predicted = trainer.predict(rows)
    logits = predicted.predictions
    return history, metrics, [value for name, value in predicted.metrics.items() if counts(name)], logits


def counts(name):
    """Tell whether a metric is no clock."""
    return not any(part in name for part in ("runtime", "second", "epoch", "step", "flos", "preparation"))


def assert_same(found, expected, wide=False):
    """Compare two runs; `wide` in bf16, where a loss in another order rounds elsewhere, by 0.6% after two steps."""
    rtol = 2.5e-2 if wide else 1e-4
    torch.testing.assert_close(found[:3], expected[:3], rtol=rtol, atol=1e-6)
    assert type(found[3]) is type(expected[3])
    if expected[3] is not None:
        (logits, *_), (plain_logits, *_) = (
            logits if isinstance(logits, (tuple, list)) else [logits] for logits in (found[3], expected[3])
        )
        assert logits.shape == plain_logits.shape and logits.dtype == plain_logits.dtype
        assert numpy.linalg.norm(logits - plain_logits) <= rtol * numpy.linalg.norm(plain_logits)


@functools.cache
def plain(option, build, folder):
    return run(folder, build=BUILDS[build][0], rows=BUILDS[build][1], **OPTIONS[option])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, way, tmp_path_factory, stand_in):
    folder = tmp_path_factory.getbasetemp()
    assert_same(run(folder, way, **OPTIONS[option]), plain(option, "causal", folder), "bf16" in option)


CLASSES = [row | {"labels": row["labels"][-1] % 3} for row in ROWS]
BUILDS = {
    "causal": (causal, ROWS),
    "without kwargs": (without_kwargs, ROWS),
    "adapted": (adapted, ROWS),
    "masked": (masked, ROWS),
    "translator": (translator, [row | {"decoder_input_ids": row["input_ids"]} for row in ROWS]),
    "classifier": (classifier, CLASSES),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", list(BUILDS)[1:])
@pytest.mark.parametrize("option", ["none", "label_smoothing_factor", "compute_loss_func", "compute_loss"])
def test_models(option, build, way, tmp_path_factory, stand_in):
    if build == "classifier" and option in ("compute_loss_func",):
        pytest.skip("that loss is of tokens")
    folder = tmp_path_factory.getbasetemp()
    found = run(folder, way, *BUILDS[build], **OPTIONS[option])
    assert_same(found, plain(option, build, folder))


@pytest.mark.parametrize("arguments", [{}, {"bf16": True}, {"label_smoothing_factor": 0.1}, {"class": LossOfLogits}])
def test_compiled(arguments, tmp_path, stand_in):
    """A compiled model's outputs hold no logits that a wrapper of the trainer could cast."""
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager", "prediction_loss_only": True}
    expected = run(tmp_path, **arguments, **compiled)  # a Trainer smooths the labels of compiled models unshifted
    assert_same(run(tmp_path, "flag", **arguments, **compiled), expected, "bf16" in arguments)

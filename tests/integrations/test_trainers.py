"""Run trainers: losses in fp32 equal the plain model's, and need less memory."""

import itertools
import os
from importlib.util import find_spec

import pytest
import torch
from ranks import device

import liger_hw
from liger_lab.bench import memory

for package in ("transformers", "accelerate"):
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed", allow_module_level=True)

import transformers  # noqa: E402

STEPS = 4


def make_model(vocabulary=256, **more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_rows(count, length, vocabulary=256):
    ids = torch.randint(3, vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row.masked_fill(torch.arange(length) < i % 5, -100)}
            for i, row in enumerate(ids)]  # fmt: skip


def train(folder, patched=False, adapt=lambda model: model, **arguments):
    """(the losses of a Trainer's steps and of its evaluation, the model's weights)."""
    model = adapt(make_model())
    if patched:
        liger_hw.patch(model)
    rows = make_rows(16, 24)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, seed=0,
            save_strategy="no", disable_tqdm=True, optim="sgd", learning_rate=0.5, **arguments,
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
    )  # fmt: skip
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return [*losses, trainer.evaluate()["eval_loss"]], model.state_dict()


def assert_same(found, expected):
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-6, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    "arguments",
    [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True, "label_smoothing_factor": 0.1},
     {"prediction_loss_only": True, "torch_compile": True, "torch_compile_backend": "aot_eager"}],
    ids=["plain", "accumulated", "recomputed, smoothed", "compiled"],
)  # fmt: skip
def test_trainer(arguments, tmp_path):
    expected = train(tmp_path, **{key: value for key, value in arguments.items() if "compile" not in key})
    assert expected[0][0] != expected[0][STEPS - 1]
    assert_same(train(tmp_path, patched=True, **arguments), expected)


def test_trainer_through_the_stand_in(tmp_path, stand_in):
    expected = train(tmp_path)
    assert_same(train(tmp_path, use_liger_kernel=True), expected)
    config = {"rope": False, "fused_linear_cross_entropy": False, "cross_entropy": True}
    assert_same(train(tmp_path, use_liger_kernel=True, liger_kernel_config=config), expected)


def test_trainer_with_adapters(tmp_path, stand_in):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")

    def adapt(model):
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", modules_to_save=["lm_head"], r=4)
        return peft.get_peft_model(model, config)

    options = {"adapt": adapt, "gradient_checkpointing": True}
    expected = train(tmp_path, **options)
    assert expected[0][0] != expected[0][STEPS - 1]
    assert_same(train(tmp_path, patched=True, **options), expected)
    assert_same(train(tmp_path, use_liger_kernel=True, **options), expected)


def step_bytes(model, batch):
    def step():
        model(**batch).loss.backward()

    step(), model.zero_grad()
    return memory.peak(step, torch.device("cpu"))


def test_a_step_takes_less_memory():
    """Plain holds the logits three times in fp32: logits, log-probabilities and gradient."""
    vocabulary = 8192
    rows = make_rows(8, 96, vocabulary)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    model = make_model(vocabulary)
    plain = step_bytes(model, batch)
    liger_hw.patch(model)
    patched = step_bytes(model, batch)
    logits = batch["input_ids"].numel() * vocabulary * 4
    assert plain - patched > logits


def test_accelerate(tmp_path):
    from accelerate import Accelerator

    def run(patched):
        accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=2), make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if patched:
            liger_hw.patch(model)
        loader = torch.utils.data.DataLoader(make_rows(16, 24), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(), optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.save_model(model, tmp_path / str(patched))
        return losses, accelerator.unwrap_model(model).state_dict()

    assert_same(run(True), run(False))
    saved = [sorted(os.listdir(tmp_path / str(patched))) for patched in (False, True)]
    assert saved[0] == saved[1]


def run_replica(rank, patched, checkpointed):
    """(the losses, the weights) of one of two processes that share every batch."""
    model = make_model().to(device())
    if patched:
        liger_hw.patch(model)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = torch.nn.parallel.DistributedDataParallel(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for row in make_rows(2 * STEPS, 24)[rank::2]:
        loss = model(**{name: value[None].to(device()) for name, value in row.items()}).loss
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        losses.append(loss.item())
    return losses, model.module.state_dict()


def replica(folder):
    rank = torch.distributed.get_rank()
    found = {key: run_replica(rank, *key) for key in itertools.product((False, True), repeat=2)}
    torch.save(found, folder / str(rank))


def test_two_processes_of_ddp(ranks, tmp_path):
    ranks(2, replica, tmp_path)
    one, other = (torch.load(tmp_path / str(rank), map_location="cpu") for rank in range(2))
    for checkpointed in (False, True):
        for found in (one, other):
            assert_same(found[True, checkpointed], found[False, checkpointed])
        assert one[True, checkpointed][0] != other[True, checkpointed][0], "both ranks had the same rows"
        for name, value in one[True, checkpointed][1].items():
            assert torch.equal(value, other[True, checkpointed][1][name]), f"the ranks differ in {name}"

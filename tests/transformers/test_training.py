"""Patched models under what people train with: the Trainer, adapters, torch.compile, sharding."""

import copy

import pytest
import tiny
import torch

import liger_hw
from liger_hw.patching import swapping

transformers = tiny.transformers


@pytest.fixture(autouse=True)
def own_precision(monkeypatch):
    """Restore the environment, where transformers 4.57 leaves a Trainer's precision."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


def assert_same_curve(found, expected, rtol=1e-5):
    atol = 1e-4 if transformers.__version__ < "5" else 0  # 4.57 logs four digits behind the point
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=atol)


def train(model, tmp_path, **arguments):
    rows = [{name: value[0] for name, value in tiny.tokens(1, length=9 + i % 3, seed=i).items()} for i in range(16)]
    longest = max(len(row["input_ids"]) for row in rows)

    def collate(rows):
        def pad(name, value):
            return torch.stack(
                [torch.nn.functional.pad(r[name], (0, longest - len(r[name])), value=value) for r in rows]
            )

        return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}

    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, seed=0,
        save_strategy="no", disable_tqdm=True, lr_scheduler_type="constant", learning_rate=1e-2, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], data_collator=collate)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return [log["loss"] for log in trainer.state.log_history if "loss" in log] + [evaluated]


@pytest.mark.parametrize(
    "arguments", [{"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"bf16": True}], ids=str
)
def test_trainer(tmp_path, arguments):
    plain, patched = tiny.pair("qwen3")
    expected, found = (train(m, tmp_path, **arguments) for m in (plain, patched))
    assert_same_curve(found, expected, rtol=1e-2 if "bf16" in arguments else 1e-5)


@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize(
    "adapter, fused",
    [
        ({"target_modules": ["q_proj", "gate_proj", "down_proj"]}, True),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapted"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}, True),
    ],
    ids=["projections", "lora head", "saved head"],
)
def test_adapters(adapter, fused, patch_first, tmp_path):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    plain, patched = tiny.model(), tiny.model()
    if patch_first:
        liger_hw.patch(patched)
    wrapped = []
    for m in (plain, patched):
        torch.manual_seed(5)
        wrapped.append(
            peft.get_peft_model(m, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **adapter))
        )
    if not patch_first:
        liger_hw.patch(wrapped[1])
    fused = not patch_first if fused == "adapted" else fused
    tiny.assert_learns_alike(*wrapped, fused=fused, **tiny.tokens())
    wrapped[1].save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model(), tmp_path)
    torch.testing.assert_close(loaded(**tiny.tokens()).loss, wrapped[0].eval()(**tiny.tokens()).loss)
    merged = wrapped[1].merge_and_unload()
    torch.testing.assert_close(merged(**tiny.tokens()).loss, wrapped[0](**tiny.tokens()).loss)


@pytest.fixture
def process_group():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("units", ["root", "layers", "layers and head", "norm with head"])
def test_sharded_by_fsdp2(units, process_group):
    from torch.distributed.fsdp import fully_shard

    plain, patched = tiny.pair()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for model in (plain, patched):  # FSDP2 keeps a table of classes
        if units != "root":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
        if units == "layers and head":
            fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
        if units == "norm with head":
            fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
    assert "liger_original" not in dir(type(plain)) and "liger_original" in dir(type(patched))
    for _ in range(2):
        expected, found = tiny.call(plain, **tiny.tokens()), tiny.call(patched, **tiny.tokens())
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        # a program may use the parameters next, and not the backward
        assert [type(p) for p in patched.parameters()] == [type(p) for p in plain.parameters()]
        expected.loss.backward(), found.loss.backward()
        assert tiny.is_lazy(found)
        with pytest.raises(RuntimeError, match="sharded"):
            found.logits.sum()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad.full_tensor(), rtol=1e-3, atol=1e-5)


def test_replicas_of_data_parallel_return_what_it_can_gather():
    _, patched = tiny.pair()
    found = patched._replicate_for_data_parallel()(**tiny.tokens())
    assert found.logits is None and found.loss.isfinite()


def test_two_models_of_a_family_train_side_by_side(tmp_path):
    plain, patched = tiny.pair()
    other = copy.deepcopy(plain)
    liger_hw.patch(other, rms_norm=False, rope=False)
    assert len({swapping.is_swapped(m.model.norm) for m in (plain, patched)}) == 2
    curves = [train(m, tmp_path) for m in (plain, patched, other)]
    for curve in curves[1:]:
        assert_same_curve(curve, curves[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_that_torch_quantises_by_their_class():
    plain, patched = (
        torch.ao.quantization.quantize_dynamic(model.eval(), {torch.nn.Linear}, dtype=torch.qint8)
        for model in tiny.pair()
    )
    assert type(patched.lm_head) is type(plain.lm_head) is torch.ao.nn.quantized.dynamic.Linear
    for labels in ({}, {"labels": None}):
        tokens = tiny.tokens() | labels
        assert torch.equal(patched(**tokens).logits, plain(**tokens).logits)

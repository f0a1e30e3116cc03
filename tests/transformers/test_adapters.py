"""Patched models with adapters: every layer, quantised ones too, with activations recomputed, merged and unmerged."""

import contextlib
import copy

import pytest
import tiny
import torch
import torch.nn.utils.parametrize
from quantised import FourBits, Int8Linear, in_4_bits, in_8_bits

import liger_hw
from liger_hw import dequantize_4bit
from liger_hw.kernels.linear.dequantize_4bit import dequantize_arguments
from liger_hw.patching import swapping

pytestmark = pytest.mark.usefixtures("recognised_once")

peft = pytest.importorskip("peft", reason="the package peft is not installed")

EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(model, **options):
    """A PEFT model whose fresh adapters change the output; equal calls give equal weights."""
    torch.manual_seed(5)
    options = {"target_modules": EVERYWHERE, "init_lora_weights": False, "lora_dropout": 0.1} | options
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))


def pair(patch_first, prepare=lambda model: model, family="llama", config=(), **options):
    """Make a plain and a patched model with the same adapters, patched before or after."""
    plain, patched = (prepare(tiny.model(family, **dict(config))) for _ in range(2))
    if patch_first:
        liger_hw.patch(patched)
    plain, patched = adapted(plain, **options), adapted(patched, **options)
    if not patch_first:
        liger_hw.patch(patched)
    return plain, patched


def swapped(model):
    return sum(map(swapping.is_swapped, model.modules()))


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched", "adapted"])
@pytest.mark.parametrize(
    "options, fused",
    [
        ({}, True),
        ({"target_modules": "all-linear", "use_dora": True}, True),
        ({"target_modules": [*EVERYWHERE, "embed_tokens"]}, True),
        ({"target_modules": [*EVERYWHERE, "lm_head"]}, "adapted"),
        ({"target_modules": [*EVERYWHERE, "lm_head"], "use_dora": True}, False),
        ({"target_modules": ["lm_head"], "lora_bias": True}, False),
        ({"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]}, True),
        ({"target_modules": ["o_proj"], "layers_to_transform": [1]}, True),
    ],
    ids=["projections", "all linear, dora", "embedding", "head", "head, dora", "head, bias", "saved", "one layer"],
)
def test_any_layer(options, fused, patch_first):
    plain, patched = pair(patch_first, **options)
    assert swapped(patched) > 5
    fused = not patch_first if fused == "adapted" else fused
    tiny.assert_learns_alike(plain, patched, fused=fused, **tiny.tokens())


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "lm_head"]], ids=" ".join)
@pytest.mark.parametrize("part", ["base_layer", "lora_A.default", "lora_B.default"])
def test_a_part_of_an_adapted_head_written_before_the_backward(part, targets):
    """The backward fails where PEFT's does, else gives its gradients: hidden states are frozen but for q_proj."""
    errors = []
    plain, patched = models = pair(False, target_modules=targets, lora_dropout=0.0)
    for model in models:
        loss = tiny.call(model, **tiny.tokens()).loss
        with torch.no_grad():
            model.base_model.model.lm_head.get_submodule(part).weight.mul_(1.5)
        try:
            loss.backward()
            errors.append(None)
        except RuntimeError as error:
            errors.append("modified by an inplace operation" in str(error))
    assert errors in ([None, None], [True, True])
    for p, q in zip(plain.parameters(), patched.parameters(), strict=True):
        if errors[0] is None and p.requires_grad:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("copies", [None, True, False], ids=["no hooks", "hooks that copy", "hooks"])
@pytest.mark.parametrize("part", ["base_layer", "lora_B.default"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_writes_to_an_adapted_head_that_torch_does_not_count(options, part, copies):
    """The backward has PEFT's gradients, or refuses where those mix two weights."""
    plain, patched = models = pair_with_head(lora_dropout=0.0, **options)
    for model in models:
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone if copies else lambda x: x, lambda x: x)
        with contextlib.nullcontext() if copies is None else hooks:
            loss = tiny.call(model, **tiny.tokens()).loss
        model.base_model.model.lm_head.get_submodule(part).weight.data.mul_(1.5)
        if model is patched and copies is None and not options:
            with pytest.raises(RuntimeError, match="the head's weights? changed .* call backward before"):
                loss.backward()
            return
        loss.backward()
    for p, q in zip(plain.parameters(), patched.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-5)


def pair_with_head(**options):
    return pair(False, target_modules=["q_proj", "lm_head"], **options)


def lora_head(model):
    return model.get_output_embeddings()


def test_an_adapter_of_the_head_that_writes_to_a_part_of_its_logits():
    """aLoRA changes the tokens from its invocation on."""
    inputs = tiny.tokens()
    inputs["input_ids"][:, 3] = 5
    tiny.assert_learns_alike(*pair_with_head(alora_invocation_tokens=[5]), fused=False, **inputs)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: vars(head.lora_dropout["default"]).update(inplace=True),
        lambda head: head.lora_dropout["default"].register_forward_pre_hook(lambda _, args: args[0].data.mul_(0.5)),
        lambda head: head.lora_A["default"].register_forward_pre_hook(lambda _, args: args[0].data.mul_(0.5)),
        lambda head: head.lora_dropout.update({"default": Noise()}),
    ],
    ids=["dropout in place", "hook of the dropout", "hook of A", "a module of a program"],
)
def test_parts_of_an_adapted_head_that_write_to_its_input(change):
    """PEFT's base layer has read it before."""
    plain, patched = pair_with_head(lora_dropout=0.3)
    losses = []
    for model in (plain, patched):
        change(lora_head(model))
        torch.manual_seed(7)
        losses.append(tiny.call(model, **tiny.tokens()).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    for p, q in zip(plain.parameters(), patched.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6)


class Noise(torch.nn.Module):
    def forward(self, x):
        x.data.add_(torch.rand_like(x))
        return x


def test_a_compiled_model_with_an_adapted_head_evaluates():
    plain, patched = pair_with_head(lora_dropout=0.0)
    compiled = torch.compile(patched, backend="eager")
    inputs = tiny.tokens()
    compiled(**inputs, use_cache=False).loss.backward()
    del inputs["labels"]
    torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, plain(**inputs, use_cache=False).logits)


def test_few_rows_compute_their_logits():
    """A copy of the weight would take more memory."""
    tiny.assert_learns_alike(*pair_with_head(), fused=False, **tiny.tokens(batch=1, length=9))


def test_two_adapters_of_the_head():
    models = pair_with_head(lora_alpha=3)
    for model in models:
        torch.manual_seed(6)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_lora_weights=False)
        model.add_adapter("second", config)
        model.base_model.set_adapter(["default", "second"])
    tiny.assert_learns_alike(*models, **tiny.tokens())
    for model in models:
        model.set_adapter("second")
    tiny.assert_learns_alike(*models, **tiny.tokens())


@pytest.mark.parametrize("family", ["gemma2", "granite"])  # a softcap; a scale
def test_head_with_further_steps(family):
    tiny.assert_learns_alike(*pair_with_head(family=family), **tiny.tokens())


def test_logits_of_an_adapted_head():
    plain, patched = pair_with_head()
    expected, found = (tiny.call(m, **tiny.tokens()) for m in (plain, patched))
    torch.testing.assert_close(found.logits[..., :], expected.logits, rtol=1e-4, atol=1e-5)
    for outputs, model in ((expected, plain), (found, patched)):
        model.zero_grad()
        (outputs.loss + outputs.logits.square().mean()).backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("part", ["lora_A", "lora_B", "base_layer", ""])
def test_hooks_on_parts_of_the_head_are_called(part):
    plain, patched = pair_with_head()
    seen = {}
    for name, model in (("plain", plain), ("patched", patched)):
        module = lora_head(model).get_submodule(part)
        module = module["default"] if isinstance(module, torch.nn.ModuleDict) else module
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.detach().clone()}))
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())
    torch.testing.assert_close(seen["patched"], seen["plain"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("autocast", [True, False])
def test_adapters_in_fp32_on_a_bf16_head(autocast):
    """Only autocast multiplies both in one dtype."""
    plain, patched = (m.to(torch.bfloat16) for m in pair_with_head())
    for model in (plain, patched):
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data = parameter.data.float()
    losses = []
    for model in (plain, patched):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = tiny.call(model, **tiny.tokens())
        losses.append(outputs.loss.detach())
        outputs.loss.backward()
    assert not tiny.is_lazy(outputs)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0)


def test_head_in_bf16_under_autocast_of_fp32_weights():
    """The loss is nearer to fp32's than the plain one, or as near: its logits round once."""
    plain, patched = pair_with_head()
    exact = tiny.call(copy.deepcopy(plain), **tiny.tokens()).loss
    losses = []
    for model in (plain, patched):
        with torch.autocast("cpu", torch.bfloat16):
            outputs = tiny.call(model, **tiny.tokens())
        losses.append(outputs.loss)
        outputs.loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    assert tiny.is_lazy(outputs)
    of_plain, of_patched = ((loss - exact).abs() for loss in losses)
    assert of_patched <= 1.25 * of_plain + 1e-3 * exact


def test_unpatched_adapted_head():
    plain, patched = pair_with_head()
    liger_hw.unpatch(patched)
    assert not swapped(patched) and type(lora_head(patched)) is peft.tuners.lora.layer.Linear
    assert torch.equal(tiny.call(patched, **tiny.tokens()).loss, tiny.call(plain, **tiny.tokens()).loss)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched", "adapted"])
@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2"])
def test_other_families(family, patch_first):
    plain, patched = pair(patch_first, family=family, target_modules="all-linear")
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_activations_recomputed(target, reentrant):
    plain, patched = pair(False, target_modules=[*EVERYWHERE, target])
    for model in (plain, patched):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched", "adapted"])
@pytest.mark.parametrize("target", ["q_proj", "lm_head"])
def test_merged_and_unmerged(target, patch_first):
    """Merge, unmerge, disable and unload adapters: outputs equal the plain model's."""
    plain, patched = (m.eval() for m in pair(patch_first, target_modules=[*EVERYWHERE, target]))

    def check():
        expected, found = (tiny.call(m, **tiny.tokens()) for m in (plain, patched))
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.logits[..., :], expected.logits, rtol=1e-4, atol=1e-4)
        return found.loss.item()

    apart = check()
    for model in (plain, patched):
        model.merge_adapter()
    assert abs(check() - apart) < 1e-4
    for model in (plain, patched):
        model.unmerge_adapter()
    check()
    with plain.disable_adapter(), patched.disable_adapter():
        assert abs(check() - apart) > 1e-3
    plain, patched = plain.merge_and_unload(), patched.merge_and_unload()
    assert abs(check() - apart) < 1e-4
    assert not [name for name, _ in patched.named_parameters() if "lora" in name]
    for model in (plain, patched):
        model.train().requires_grad_(True)  # an adapted model's own weights were frozen
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


def prepare_for_training(model):
    return peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched", "adapted"])
@pytest.mark.parametrize("head", [False, True], ids=["", "quantised head"])
def test_quantised(head, patch_first):
    plain, patched = pair(patch_first, prepare=lambda model: prepare_for_training(in_8_bits(model, head)))
    assert sum(isinstance(m, Int8Linear) for m in patched.modules()) == 14 + head
    assert swapped(patched) > 5
    tiny.assert_learns_alike(plain, patched, fused=not head, **tiny.tokens())


def of_bitsandbytes(linear, compute_dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
    new = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None,
                                     compute_dtype=compute_dtype, quant_type="nf4")  # fmt: skip
    new.weight = bitsandbytes.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4",
                                            module=new)  # fmt: skip
    new.bias = linear.bias
    return new.to("cpu")


four_bits = pytest.mark.parametrize("make", [FourBits, of_bitsandbytes], ids=["stand-in", "bitsandbytes"])


def on_the_op(model):
    return sum(hasattr(m, "lora_A") and swapping.is_swapped(m) for m in model.modules())


@four_bits
@pytest.mark.parametrize("checkpointing", [False, True])
def test_quantised_in_4_bits(make, checkpointing):
    def prepare(model):
        return peft.prepare_model_for_kbit_training(in_4_bits(model, make), checkpointing, {"use_reentrant": False})

    plain, patched = pair(False, prepare=prepare)
    assert on_the_op(patched) == 14
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


def layers_in_4_bits(make, dtype=torch.float32, compute_dtype=torch.float32, **options):
    """PEFT's layer around one in 4 bits, and a patched one of the same numbers."""
    layers = []
    for is_patched in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(make(torch.nn.Linear(64, 24).to(compute_dtype), compute_dtype))
        model.is_loaded_in_4bit = True
        options = {"target_modules": ["0"], "r": 4, "init_lora_weights": False} | options
        peft.get_peft_model(model, peft.LoraConfig(**options))
        if is_patched:
            assert liger_hw.patch(model).left.total() == 0
        layers.append(model[0])
    return *layers, torch.randn(600, 64, dtype=dtype)


@four_bits
@pytest.mark.parametrize(
    "change, is_served",
    [
        (lambda layer: None, True),
        (lambda layer: layer.base_layer.weight.quant_state.absmax.mul_(2), True),
        (lambda layer: layer.base_layer.bias.data.mul_(2), True),
        (lambda layer: setattr(layer.base_layer, "compute_type_is_set", False), False),
        (lambda layer: setattr(layer.base_layer, "bias", torch.nn.Parameter(layer.base_layer.bias.half())), False),
        (lambda layer: layer.base_layer.register_forward_hook(lambda _, args, y: 2 * y), False),
        (lambda layer: layer.merged_adapters.append("default"), False),
    ],
    ids=["as patched", "scales", "bias", "no dtype yet", "another dtype of bias", "hook", "merged"],
)  # fmt: skip
def test_layer_in_4_bits_in_any_state(make, change, is_served):
    plain, patched, x = layers_in_4_bits(make)
    change(plain), change(patched)
    if plain.base_layer.bias.dtype != torch.float32 and make is FourBits:
        pytest.skip("bitsandbytes casts the bias")
    assert (patched.liger_adapted(x) is not None) == is_served
    assert torch.equal(patched(x), plain(x))


def test_calls_that_bitsandbytes_serves_better():
    """Few rows without gradients, and a CPU's layout for inference."""
    _, patched, x = layers_in_4_bits(FourBits)
    with torch.no_grad():
        assert patched.liger_adapted(x) is not None and patched.liger_adapted(x[:511]) is None
        assert patched.eval().liger_adapted(x) is None
    assert patched.liger_adapted(x) is None and patched.liger_adapted(x.requires_grad_()) is not None


@four_bits
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_4_bits(make, dtype, autocast):
    """Nearer to exact results than PEFT's, or as near: x in fp32 reaches the adapter in fp32."""
    plain, patched, x = layers_in_4_bits(make, dtype, torch.bfloat16)
    weight = dequantize_4bit(*dequantize_arguments(plain.base_layer.weight)).double()
    a, b = (part["default"].weight.double() for part in (plain.lora_A, plain.lora_B))
    exact = x.double() @ weight.T + plain.base_layer.bias.double() + x.double() @ a.T @ b.T * plain.scaling["default"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert patched.liger_adapted(x) is not None
        expected, found = plain(x), patched(x)
    assert found.dtype == expected.dtype == dtype
    of_plain, of_patched = ((y.double() - exact).norm() for y in (expected, found))
    assert of_patched <= 1.01 * of_plain


def test_4_bits_not_yet_quantised():
    model = torch.nn.Sequential(FourBits(torch.nn.Linear(64, 24), torch.float32))
    model[0].weight.quant_state = None
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4))
    ((_, reason),) = liger_hw.patch(model).left
    assert reason == "LoRA around FourBits before its weight is quantised: patch again after that"


def test_layer_of_another_arithmetic():
    class Doubled(FourBits):
        def forward(self, x):
            return 2 * super().forward(x)

    model = torch.nn.Sequential(Doubled(torch.nn.Linear(64, 24), torch.float32))
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=4))
    ((_, reason),) = liger_hw.patch(model).left
    assert reason == "this version of Doubled computes its 4 bits otherwise"


def test_two_adapters_and_a_copy():
    plain, patched = pair(False)
    for model in (plain, patched):
        torch.manual_seed(6)
        model.add_adapter("other", peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False, r=2))
    for name in ("other", "default"):
        plain.set_adapter(name), patched.set_adapter(name)
        tiny.assert_learns_alike(plain, copy.deepcopy(patched), **tiny.tokens())
    liger_hw.unpatch(patched)
    assert not swapped(patched)
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())


LAYER = peft.tuners.lora.layer.Linear


def watched(model):
    projection = model.base_model.model.model.layers[0].self_attn.q_proj
    projection.lora_A["default"].register_forward_hook(lambda _, args, out: 3 * out)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: None, lambda model: model.merge_adapter(), watched,
        lambda model: [m.scaling.update(default=7.0) for m in model.modules() if isinstance(m, LAYER)],
        lambda model: model.base_model.disable_adapter_layers(),
    ],
    ids=["one adapter", "merged", "a hook", "scaling", "disabled"],
)  # fmt: skip
def test_lora_layers_in_any_state(change):
    """On a CPU both compute the same bits."""
    plain, patched = pair(False, lora_dropout=0.0)
    assert on_the_op(patched) == 14
    for model in (plain, patched):
        torch.manual_seed(7)
        change(model)
    expected, found = (model(tiny.tokens()["input_ids"]).logits for model in (plain, patched))
    assert torch.equal(found, expected)


def test_scaling_that_is_a_tensor():
    """The op takes a number, and would lose a tensor's gradient."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6))
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    liger_hw.patch(model)
    x = torch.randn(3, 8)
    assert model[0].liger_adapted(x) is not None
    for scaling in (torch.tensor(1.5, requires_grad=True), torch.linspace(0.5, 2, 6)):
        model[0].scaling["default"] = scaling
        assert model[0].liger_adapted(x) is None


def test_plain_layer_that_changed_its_class():
    """A parametrization does so."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6))
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    liger_hw.patch(model)
    torch.nn.utils.parametrize.register_parametrization(model[0].base_layer, "weight", torch.nn.Tanh())
    x = torch.randn(3, 8)
    found = model(x)
    liger_hw.unpatch(model)
    assert torch.equal(found, model(x))


def test_lora_turned_off():
    model = adapted(tiny.model("llama"))
    assert liger_hw.patch(model, lora=False).left["Linear", "lora=False"] == 14
    assert on_the_op(model) == 0
    model = tiny.model("llama")
    liger_hw.patch(model, lora=False)
    assert on_the_op(adapted(model)) == 0


@pytest.mark.parametrize("flags", [{}, {"fused_linear_cross_entropy": False}], ids=["loss", "model"])
def test_layers_that_peft_adds_to_a_patched_model(flags):
    models = [tiny.model("llama", num_hidden_layers=1) for _ in range(2)]
    liger_hw.patch(models[0], **flags)
    models[0] = copy.deepcopy(models[0])
    models = [adapted(model) for model in models]
    liger_hw.patch(models[1], **flags)
    assert [on_the_op(model) for model in models] == [7, 7]
    after, before = (tiny.call(model, **tiny.tokens()) for model in models)
    assert torch.equal(after.loss, before.loss)
    base = models[0].base_model.model
    assert base.peft_config is models[0].peft_config
    del base.peft_config
    assert not hasattr(base, "peft_config")
    liger_hw.unpatch(models[0])
    assert not swapped(models[0])

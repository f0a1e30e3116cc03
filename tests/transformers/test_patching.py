"""Check that patching changes nothing but speed and memory."""

import copy
import functools
import importlib
import io
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import warnings

import pytest
import tiny
import torch
from torch.overrides import TorchFunctionMode

import liger_hw
from liger_hw import _torch
from liger_hw.patching import probing, swapping
from liger_hw.patching.flags import FLAGS
from liger_hw.patching.loss import NO_HUGGING_FACE_MODEL
from liger_hw.patching.patch import _log_once
from liger_hw.transformers import monkey_patch

transformers = tiny.transformers


def classes(model):
    # with the match, as a patched class equals its original
    return [(type(module), vars(type(module)).get("liger_match")) for module in model.modules()]


def swapped(model):
    return [module for module in model.modules() if swapping.is_swapped(module)]


def kinds(model):
    names = {type(module).liger_match.op or type(module).liger_match.kind for module in swapped(model)}
    return names - {"skip_logits"}  # an argument alone


def logits(model, **inputs):
    with torch.no_grad():
        return model(input_ids=tiny.tokens()["input_ids"], use_cache=False, **inputs).logits


def test_summary_says_what_was_done(caplog):
    model = tiny.model("apertus")
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, "liger_hw"):
        summary = liger_hw.patch(model)
    record, *_ = [record for record in caplog.records if record.name == "liger_hw"]
    assert str(summary) in record.getMessage()
    assert summary.replaced["ApertusRMSNorm", "rms_norm(casting_mode='llama', offset=0.0)"] == 9
    assert summary.replaced["ApertusAttention", "rope"] == 2
    (why,) = [why for name, why in summary.left if name == "ApertusMLP"]
    assert why == "computes softplus, which no op does" and summary.left["ApertusMLP", why] == 2
    replaced, left, counts = str(summary).split("\n\n")
    assert counts == f"{summary.replaced.total()} modules replaced, {summary.left.total()} left alone"
    assert "replaced by" in replaced and "loss: computed without logits" in replaced and "ApertusRMSNorm" in replaced
    assert "left alone because" in left and "ApertusMLP" in left
    count = len(caplog.records)
    liger_hw.patch(model)
    assert len(caplog.records) == count, "patching twice logs once"


def test_a_line_is_seen_without_a_configuration_of_logging_and_once():
    program = (
        "import tiny, liger_hw; model = tiny.model(); liger_hw.patch(model); summary = liger_hw.patch(model); "
        "liger_hw.patch(tiny.model()); print(summary.replaced.total())"
    )
    folder = pathlib.Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"LOCAL_RANK": "0"})
    lines = [line for line in done.stderr.splitlines() if line.startswith("liger_hw:")]
    count = done.stdout.split()[-1]
    assert lines == [f"liger_hw: {count} modules patched, 0 left alone (LlamaForCausalLM)"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"LOCAL_RANK": "1"})
    assert done.stdout.split()[-1] == count and "liger_hw:" not in done.stderr


def test_unpatch_restores_exactly():
    plain, patched = tiny.pair()
    expected = logits(patched)
    assert classes(patched) != classes(plain)
    attributes = [set(vars(m)) for m in plain.modules()]
    patched(**tiny.tokens()).loss.backward()
    liger_hw.unpatch(patched)
    assert classes(patched) == classes(plain) and [set(vars(m)) for m in patched.modules()] == attributes
    assert torch.equal(logits(patched), expected) and torch.equal(logits(plain), expected)
    assert type(patched(**tiny.tokens()).logits) is torch.Tensor


def test_patching_twice_is_patching_once():
    model = tiny.model()
    liger_hw.patch(model)
    once = classes(model)
    liger_hw.patch(model)
    assert classes(model) == once
    liger_hw.patch(model, rope=False)
    assert kinds(model) == {"rms_norm", "swiglu", "head", "causal_lm"}


@pytest.mark.parametrize("flag, gone", [("rope", "rope"), ("rms_norm", "rms_norm"), ("swiglu", "swiglu")])
def test_flags_leave_parts_alone(flag, gone):
    model = tiny.model()
    summary = liger_hw.patch(model, **{flag: False})
    assert gone not in kinds(model) and any(why == f"{flag}=False" for _, why in summary.left)
    liger_hw.patch(model, fused_linear_cross_entropy=False)
    assert kinds(model) == {"rms_norm", "rope", "swiglu"}


@pytest.mark.parametrize(
    "flags, named",
    [
        ({"rmsnorm": True}, "^unknown (flag|argument) 'rmsnorm'; did you mean 'rms_norm'"),
        ({"cross_entropy": True}, "fused_linear_cross_entropy"),
        ({"rope": True, "x": False}, "^unknown (flag|argument) 'x'. "),
        ({"rms_norm": "no"}, "^rms_norm: got 'no', allowed: True, False"),
    ],
)
def test_bad_flags_are_errors(flags, named):
    model = tiny.model()
    for call in (liger_hw.patch, liger_hw.apply_liger_kernel_to_llama, monkey_patch._apply_liger_kernel_to_instance):
        with pytest.raises(ValueError, match=named):
            call(model=model, **flags)
    assert not swapped(model)
    for call in (liger_hw.patch, liger_hw.unpatch):
        for no_model in ("llama", None, model.config):
            with pytest.raises(ValueError, match="^model: got .*allowed: a torch.nn.Module"):
                call(no_model)


def test_patching_touches_one_model_only():
    first, second = tiny.model(), tiny.model()
    forward = transformers.LlamaForCausalLM.forward
    rotate = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    liger_hw.patch(first)
    assert not swapped(second) and transformers.LlamaForCausalLM.forward is forward
    assert transformers.models.llama.modeling_llama.apply_rotary_pos_emb is rotate
    tiny.assert_learns_alike(second, first, **tiny.tokens())


def never_seen(model):
    """`model`, whose modules have classes that nothing is remembered of."""
    for module in model.modules():
        cls = type(module)
        if not cls.__module__.startswith("torch."):
            module.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    return model


@pytest.fixture
def generators_refused(monkeypatch):
    """Every function of torch that reads, seeds or sets a global generator raises."""
    names = ("manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "fork_rng", "get_rng_state",
             "get_rng_state_all", "set_rng_state", "set_rng_state_all")  # fmt: skip

    def refuse(*args, **kwargs):
        raise AssertionError("a global generator was asked")

    owners = torch, torch.random, torch.cuda, torch.cuda.random, torch.xpu, torch.xpu.random, torch.mps, torch.mtia
    for owner in owners:
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, refuse)
    return torch._C.default_generator.get_state


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mixtral", "nemotron", "phi3"])
def test_patching_and_a_first_forward_leave_random_state_and_weights_alone(family, generators_refused):
    torch._C.default_generator.manual_seed(0)
    model = never_seen(transformers.AutoModelForCausalLM.from_config(tiny_config(family)))
    before, state = copy.deepcopy(model.state_dict()), generators_refused()
    summary = liger_hw.patch(model)
    assert any(name.endswith(("MLP", "Experts")) for name, _ in summary.replaced)
    assert torch.equal(generators_refused(), state)
    model.train()(**tiny.tokens()).loss.backward()
    assert torch.equal(generators_refused(), state), "no dropout here, so no forward draws"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def tiny_config(family):
    chances = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop")
    return transformers.AutoConfig.for_model(family, **tiny.TINY | dict.fromkeys(chances, 0.0))


@pytest.mark.parametrize("p", [0.3, 0.0])
def test_an_mlp_with_dropout_is_proved_without_a_global_generator(p, generators_refused):
    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
            self.dropout, self.inner_dropout = torch.nn.Dropout(p), p

        def forward(self, x):
            y = torch.nn.functional.dropout(torch.relu(self.up(x)).square(), self.inner_dropout, self.training)
            return self.dropout(self.down(y))

    module, state = MLP(), generators_refused()
    assert liger_hw.patch(module).replaced
    assert torch.equal(generators_refused(), state)


def test_a_model_without_memory_can_be_patched():
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.TINY))
    liger_hw.patch(model)
    assert kinds(model) == {"rms_norm", "rope", "swiglu", "head", "causal_lm"}


def test_copies_compute_with_their_own_weights():
    plain, patched = tiny.pair()
    copied = copy.deepcopy(patched)
    assert classes(copied) == classes(patched)
    for p, q in zip(copied.parameters(), plain.parameters()):
        p.data += 0.1
        q.data += 0.1
    tiny.assert_learns_alike(plain, copied, **tiny.tokens())


@pytest.mark.parametrize("through", ["pickle", "torch.save"])
def test_pickles_come_back_patched(through):
    plain, patched = tiny.pair()
    if through == "pickle":
        loaded = pickle.loads(pickle.dumps(patched))
    else:
        buffer = io.BytesIO()
        torch.save(patched, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
    assert classes(loaded) == classes(patched)
    tiny.assert_learns_alike(plain, loaded, **tiny.tokens())
    liger_hw.unpatch(loaded)
    assert classes(loaded) == classes(plain)


def test_classes_of_patched_modules_pickle():
    _, patched = tiny.pair()
    for module in patched.modules():
        assert pickle.loads(pickle.dumps(type(module))) is type(module)
    held = {type(module) for module in patched.modules()}
    assert pickle.loads(pickle.dumps(held)) == held and copy.deepcopy(held) == held
    derived = type("Derived", (type(patched.lm_head),), {})
    with pytest.raises((pickle.PicklingError, AttributeError), match="Derived"):  # as of any class without a module
        pickle.dumps(derived)


@pytest.mark.parametrize("act", ["gelu_pytorch_tanh", "gelu_new", "silu", "relu", "gelu"])
def test_every_activation_pickles(act):
    _, patched = tiny.pair("gemma2", hidden_activation=act)
    assert classes(pickle.loads(pickle.dumps(patched))) == classes(patched)


def test_saved_models_load_as_plain_ones(tmp_path):
    plain, patched = tiny.pair()
    patched.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM and loaded.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(logits(loaded), logits(plain))
    again = liger_hw.AutoLigerKernelForCausalLM.from_pretrained(tmp_path, rope=False)
    assert kinds(again) == {"rms_norm", "swiglu", "head", "causal_lm"}
    assert torch.equal(logits(again), logits(plain))


def test_auto_model_patches_any_type():
    config = transformers.AutoConfig.for_model("exaone4", **tiny.TINY)
    assert "rms_norm" in kinds(liger_hw.AutoLigerKernelForCausalLM.from_config(config))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generates_the_same(family):
    plain, patched = tiny.pair(family)
    prompt = tiny.tokens()["input_ids"][:, :6]
    mask = torch.ones_like(prompt)
    for training in (False, True):
        texts = [
            m.train(training).generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False)
            for m in (plain, patched)
        ]
        assert torch.equal(*texts)


def test_training_mode_can_be_toggled():
    plain, patched = tiny.pair()
    tiny.assert_learns_alike(plain.eval(), patched.eval(), fused=False, **tiny.tokens())
    tiny.assert_learns_alike(plain.train(), patched.train(), **tiny.tokens())
    assert torch.equal(patched.eval()(**tiny.tokens()).logits, plain.eval()(**tiny.tokens()).logits)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    plain, patched = tiny.pair()
    for m in (plain, patched):
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        m.enable_input_require_grads()
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


def test_a_replaced_forward_is_respected():
    plain, patched = tiny.pair()
    liger_hw.unpatch(patched)
    patched.model.norm.forward = lambda x: 2 * x
    summary = liger_hw.patch(patched)
    assert summary.left["LlamaRMSNorm", "its forward was replaced on the instance"] == 1
    patched.forward = patched.forward
    summary = liger_hw.patch(patched)
    assert summary.left["LlamaForCausalLM", "its forward was replaced on the instance"] == 1
    plain.model.norm.forward = lambda x: 2 * x
    assert torch.equal(logits(patched), logits(plain))


def test_unusual_calls_go_to_the_original():
    _, patched = tiny.pair()
    x = torch.randn(2, 64)
    layer = patched.model.layers[0]
    assert torch.equal(layer.mlp(x=x), layer.mlp(x))
    assert torch.equal(layer.input_layernorm(hidden_states=x), layer.input_layernorm(x))
    with pytest.raises(TypeError):
        layer.mlp(x, x)


def test_signature_is_the_originals():
    import inspect

    plain, patched = tiny.pair()
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)


def test_modules_of_no_model_are_patched_too():
    modules = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.RMSNorm(16, eps=1e-5))
    x = torch.randn(3, 16)
    expected = modules(x)
    summary = liger_hw.patch(modules)
    assert summary.replaced["LayerNorm", "layer_norm"] == 1
    torch.testing.assert_close(modules(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_torchs_rms_norm_with_its_default_eps(affine, dtype):
    plain = torch.nn.RMSNorm(16, elementwise_affine=affine).to(dtype)
    patched = copy.deepcopy(plain)
    assert plain.eps is None and not liger_hw.patch(patched).left and swapping.is_swapped(patched)
    for size in (1.0, 3e-4):  # the second is near the root of eps
        x = size * torch.randn(3, 16, dtype=dtype)
        torch.testing.assert_close(patched(x), plain(x))
    patched.eps = plain.eps = 0.1
    torch.testing.assert_close(patched(x), plain(x))


@pytest.mark.parametrize("shape", [(), (1,), (1, 16), (5, 16), (5, 1), (3,)], ids=str)
def test_a_norm_expands_a_weight_as_unpatched(shape):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    plain, x = LlamaRMSNorm(16), torch.rand(2, 5, 16)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    plain.weight = patched.weight = torch.nn.Parameter(torch.rand(shape))
    if shape == (3,):
        with pytest.raises(RuntimeError, match="size of tensor"):
            patched(x)
    else:
        torch.testing.assert_close(patched(x), plain(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["LayerNorm", "LlamaRMSNorm"])
def test_an_eps_of_none_is_the_modules_own_error(name):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    build, eps = (LlamaRMSNorm, "variance_epsilon") if name == "LlamaRMSNorm" else (torch.nn.LayerNorm, "eps")
    norm = build(8)
    assert not liger_hw.patch(norm).left and swapping.is_swapped(norm)
    setattr(norm, eps, None)
    with pytest.raises(TypeError):
        norm(torch.ones(2, 8))


def test_unpatch_says_what_it_could_not_restore(caplog):
    from torch.nn.utils import parametrize

    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    _, model = tiny.pair()
    norm = model.model.norm
    parametrize.register_parametrization(norm, "weight", Double())
    with caplog.at_level(logging.WARNING, "liger_hw"):
        liger_hw.unpatch(model)
    assert "ParametrizedLlamaRMSNorm x1" in caplog.text and "remove_parametrizations" in caplog.text
    assert [m for m in model.modules() if hasattr(type(m), "liger_original")] == [norm]
    summary = liger_hw.patch(model)
    assert sum(n for (name, _), n in summary.left.items() if name == "ParametrizedLlamaRMSNorm") == 1
    parametrize.remove_parametrizations(norm, "weight")
    caplog.clear()
    liger_hw.unpatch(model)
    assert not caplog.records and type(norm).__name__ == "LlamaRMSNorm"


class Remote(torch.nn.Module):
    """A norm of a custom model file, with uncommon names."""

    def __init__(self, scaled):
        super().__init__()
        self.gain, self.tiny_number, self.scale = torch.nn.Parameter(torch.ones(16)), 1e-5, 1.0
        self.scaled = scaled

    def forward(self, rows):
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny_number)
        wide = wide * self.scale if self.scaled else wide
        return self.gain * wide.to(rows.dtype)


def test_names_do_not_matter_and_arithmetic_does():
    recognised, scaled = Remote(False), Remote(True)
    assert str(liger_hw.patch(torch.nn.Sequential(recognised)).replaced).count("rms_norm") == 1
    assert not liger_hw.patch(torch.nn.Sequential(scaled)).replaced, "scale is 1.0 today and may not be tomorrow"
    recognised.tiny_number = 0.5
    x = torch.randn(3, 16)
    assert torch.equal(recognised(x), Remote.forward(recognised, x))


def test_a_weight_whose_memory_is_elsewhere_proves_nothing_by_being_empty():
    unlike = Remote(True)
    unlike.gain = torch.nn.Parameter(torch.empty(0))
    assert not liger_hw.patch(torch.nn.Sequential(unlike)).replaced
    alike = Remote(False)
    alike.gain = torch.nn.Parameter(torch.empty(0))
    assert liger_hw.patch(torch.nn.Sequential(alike)).replaced


def test_the_reason_names_what_the_op_lacks():
    class Residual(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    class MLPOfTwoInputs(Residual):
        def forward(self, x, residual):
            return residual + self.down(torch.relu(self.up(x)))

    class MLPWithSoftplus(Residual):
        def forward(self, x):
            return self.down(torch.nn.functional.softplus(self.up(x)))

    class LanguageModel(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.norm, self.head = torch.nn.Embedding(50, 16), torch.nn.LayerNorm(16), MLPOfTwoInputs()
            self.vocabulary = torch.nn.Linear(16, 50)

    left = [reason for m in (MLPOfTwoInputs(), MLPWithSoftplus()) for _, reason in liger_hw.patch(m).left]
    assert left == ["its forward takes 2 inputs, and an MLP's op takes one", "computes softplus, which no op does"]
    assert liger_hw.patch(LanguageModel()).left["LanguageModel", NO_HUGGING_FACE_MODEL] == 1
    assert "LanguageModel" not in dict(liger_hw.patch(tiny.model()).left)


def state_of_this_thread():
    modes = _torch.active_function_modes(), _torch.active_dispatch_modes()
    return *modes, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), list(warnings.filters)


class Harmless(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_an_interrupt_leaves_nothing_behind(place, monkeypatch):
    model, method = tiny.model(), getattr(probing.OwnGenerator, place)

    def interrupted(self, *args):
        if place == "__enter__":
            method(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(probing.OwnGenerator, place, interrupted)
    with Harmless():
        before = state_of_this_thread()
        with pytest.raises(KeyboardInterrupt):
            liger_hw.patch(model)
        assert state_of_this_thread() == before
    assert not swapped(model)


HEADS = {  # what a program's `get_output_embeddings` may do after `patch`
    "none": lambda model: None,
    "raises": lambda model: model.no_such_name,
    "weight": lambda model: model.lm_head.weight,
    "other": lambda model: model.model.norm,
}


@pytest.mark.filterwarnings("ignore:a program replaced the model's head")
@pytest.mark.parametrize("kind", [*HEADS, "callable"])
def test_a_head_that_a_program_hides(kind):
    plain, patched = tiny.pair()
    for model in (plain, patched):
        if kind == "callable":
            head = model._modules.pop("lm_head")
            model.__dict__["lm_head"] = lambda x, head=head: head(x) * 2
        else:
            model.get_output_embeddings = functools.partial(HEADS[kind], model)
    tiny.assert_learns_alike(plain, patched, fused=False, **tiny.tokens())
    for model in (plain, patched):
        model.eval()
    torch.testing.assert_close(logits(patched), logits(plain))


class Scripted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.act = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.GELU()

    def forward(self, x):
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("children", [(), ("act",), ("up", "act", "down")])
def test_torch_jit_script_before_and_after_patch(children):
    x, patched = torch.randn(3, 16), Scripted()
    plain = copy.deepcopy(patched)
    for model in (plain, patched):
        for name in children:
            setattr(model, name, torch.jit.script(getattr(model, name)))
    assert bool(liger_hw.patch(patched).replaced) == swapping.is_swapped(patched) == (not children)
    assert torch.equal(torch.jit.script(patched)(x), plain(x)) and torch.equal(patched(x), plain(x))


class TestClassLevel:
    """Before a model exists, for trainers that patch first and build later."""

    @pytest.fixture(autouse=True)
    def undo(self):
        yield
        liger_hw.unpatch(transformers.LlamaForCausalLM)

    def build(self, family="llama"):
        config = transformers.AutoConfig.for_model(family, **tiny.TINY)
        return transformers.AutoModelForCausalLM.from_config(config)

    def test_models_built_later_are_patched(self, tmp_path):
        before, plain = self.build(), tiny.model()
        liger_hw.apply_liger_kernel_to_llama(rope=False)
        assert kinds(self.build()) == {"rms_norm", "swiglu", "head", "causal_lm"}
        assert not swapped(before) and not swapped(self.build("mistral"))
        plain.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert swapped(loaded) and torch.equal(logits(loaded), logits(plain))
        liger_hw.apply_liger_kernel_to_llama()
        assert "rope" in kinds(self.build())

    def test_leaves_random_state_alone(self, generators_refused, monkeypatch):
        module = transformers.models.llama.modeling_llama
        for name in ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention"):  # of which nothing is remembered
            cls = getattr(module, name)
            monkeypatch.setattr(module, name, type(name, (cls,), {"__module__": cls.__module__}))
        states = []
        for patch in (lambda: None, liger_hw.apply_liger_kernel_to_llama):
            patch()
            torch._C.default_generator.manual_seed(0)
            model = self.build()
            states.append(generators_refused())
        assert "swiglu" in kinds(model) and torch.equal(*states)

    def test_a_reloaded_file_is_patched_again(self):
        modeling_llama = transformers.models.llama.modeling_llama
        config, before = transformers.LlamaConfig(**tiny.TINY), dict(vars(modeling_llama))
        try:
            liger_hw.apply_liger_kernel_to_llama()
            importlib.reload(modeling_llama)
            assert not swapped(modeling_llama.LlamaForCausalLM(config))
            liger_hw.apply_liger_kernel_to_llama()
            assert {"rms_norm", "swiglu", "rope", "head"} < kinds(modeling_llama.LlamaForCausalLM(config))
            assert swapped(self.build())
            liger_hw.unpatch(modeling_llama.LlamaForCausalLM)
            assert not swapped(modeling_llama.LlamaForCausalLM(config)) and not swapped(self.build())
        finally:
            vars(modeling_llama).update(before)

    def test_unpatch_of_the_class_undoes_it(self):
        own = dict(vars(transformers.LlamaPreTrainedModel))
        monkey_patch._apply_liger_kernel("llama")
        assert swapped(self.build())
        liger_hw.unpatch(transformers.LlamaForCausalLM)
        assert not swapped(self.build()) and dict(vars(transformers.LlamaPreTrainedModel)) == own

    def test_signature_has_the_flags_that_frameworks_look_for(self):
        import inspect

        parameters = inspect.signature(liger_hw.apply_liger_kernel_to_llama).parameters
        names = ["rope", "cross_entropy", "fused_linear_cross_entropy", "rms_norm", "swiglu", "model"]
        assert list(parameters) == names and set(names) - {"model"} <= set(FLAGS)
        with pytest.raises(ValueError, match="geglu"):
            liger_hw.apply_liger_kernel_to_llama(geglu=True)
        with pytest.raises(ValueError, match="unheard_of"):
            monkey_patch._apply_liger_kernel("unheard_of")

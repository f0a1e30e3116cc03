"""Compare families of Hugging Face models with their patched copies."""

import importlib.util
import inspect

import pytest
import tiny
import torch

EXPERTS_INTERFACE = importlib.util.find_spec("transformers.integrations.moe") is not None  # since transformers 5
LLAMA = {"rms_norm(casting_mode='llama', offset=0.0)", "swiglu", "rope"}
GEMMA = {"rms_norm(casting_mode='gemma', offset=1.0)", "geglu(approximate='tanh')", "rope"}
OLMO2 = {"rms_norm(casting_mode='gemma', offset=0.0)", "swiglu", "rope"}
FAMILIES = {
    "arcee": LLAMA - {"swiglu"} | {"activate(activation='relu_squared')"},  # its MLP is not gated
    "cohere": {"layer_norm", "swiglu", "rope(layout='interleaved', wide=True)"},
    "exaone4": LLAMA,
    "falcon_h1": LLAMA,  # its MLP scales the gate and the result
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "glm4": LLAMA - {"rope"} | {"rope(layout='interleaved', tables='first_half')"},
    "gpt_oss": OLMO2 - {"swiglu", "rope"} | {"clamped_swiglu(offset=1.0)", "rope(tables='shared')"},
    "granite": LLAMA,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "nanochat": {  # its norm has no weight
        "rms_norm(casting_mode='llama', offset=0.0)",
        "rope(reverse=True)",
        "activate(activation='relu_squared')",
    },
    "olmo": {"layer_norm(eps=1e-05)", "swiglu", "rope"},  # its norm has neither weight nor an attribute for eps
    "olmo2": OLMO2,
    "nemotron": {"layer_norm(offset=1.0)", "rope", "activate(activation='relu_squared')"},
    "phi": {"layer_norm", "rope", "activate(activation='gelu_new')"},
    "phi3": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "seed_oss": LLAMA,  # its MLP ends in dropout
    "smollm3": LLAMA,
    "starcoder2": {"layer_norm", "rope", "activate(activation='gelu_tanh')"},
    "stablelm": {"layer_norm", "swiglu", "rope"},  # rotates a part of the width
}


def norm_source(model):
    return inspect.getsource(type(model.model.norm))


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_round_as_theirs(family):
    plain, patched = tiny.pair(family, torch.bfloat16)
    found = set()
    for (name, theirs), ours in zip(plain.named_modules(), patched.modules()):
        match = getattr(type(ours), "liger_match", None)
        if match is None or match.kind in ("head", "causal_lm"):
            continue
        found.add(str(match))
        if match.kind in ("rope", "experts"):
            continue  # test_rotary_functions, test_models.py
        assert type(theirs).__name__ in type(ours).__name__
        weight = getattr(theirs, "weight", None)
        width = weight.shape[-1] if weight is not None else tiny.TINY["hidden_size"]
        x = torch.randn(3, width, dtype=torch.bfloat16)
        expected = theirs.eval()(x)
        assert torch.equal(ours.eval()(x), expected), name
        if match.op == "rms_norm":
            assert ours(x.float()).dtype == theirs(x.float()).dtype and torch.equal(ours(x.float()), theirs(x.float()))
    without = set() if EXPERTS_INTERFACE else {"clamped_swiglu(offset=1.0)"}
    # of older versions, whose norm asks for the type of the device
    without |= {"layer_norm(offset=1.0)"} if family == "nemotron" and '"mps"' in norm_source(plain) else set()
    assert found == FAMILIES[family] - without


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "falcon_h1"])  # 20 s of plain Mamba
def test_model_learns_as_theirs(family):
    plain, patched = tiny.pair(family)
    expected, found = tiny.assert_learns_alike(plain, patched, **tiny.tokens())
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        expected, found = tiny.call(plain.eval(), **tiny.tokens()), tiny.call(patched.eval(), **tiny.tokens())
    assert isinstance(found.logits, torch.Tensor)
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("family", ["llama", "olmo2"])  # tables in q's dtype, tables in fp32
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotary_functions(family, table_dtype):
    plain, patched = tiny.pair(family)
    q, k = torch.randn(2, 4, 5, 16, dtype=torch.bfloat16), torch.randn(2, 2, 5, 16, dtype=torch.bfloat16)
    angle = torch.randn(2, 5, 8).repeat(1, 1, 2)
    theirs, ours = (
        inspect.unwrap(type(m.model.layers[0].self_attn).forward).__globals__["apply_rotary_pos_emb"]
        for m in (plain, patched)
    )
    for options in [{"unsqueeze_dim": 1}, {}]:
        expected = theirs(q, k, angle.cos().to(table_dtype), angle.sin().to(table_dtype), **options)
        found = ours(q, k, angle.cos().to(table_dtype), angle.sin().to(table_dtype), **options)
        for e, f in zip(expected, found):
            assert e.dtype == f.dtype and torch.equal(e, f)


def test_half_precision_model_stays_close():
    plain, patched = tiny.pair("llama", torch.bfloat16)
    expected, found = tiny.call(plain, **tiny.tokens()), tiny.call(patched, **tiny.tokens())
    assert found.loss.dtype == expected.loss.dtype == torch.float32
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-2, atol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "stablelm"])
def test_autocast(family):
    plain, patched = tiny.pair(family)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = tiny.call(plain, **tiny.tokens()), tiny.call(patched, **tiny.tokens())
        assert found.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-3, atol=0)
    assert torch.equal(found.logits, expected.logits)
    expected.loss.backward(), found.loss.backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        assert q.grad.dtype == p.grad.dtype
        torch.testing.assert_close(q.grad, p.grad, rtol=0.1, atol=0.02)


def test_fp32_norm_weights_on_half_precision_activations():
    plain, patched = tiny.pair("llama", torch.bfloat16)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for m in (plain, patched):
        m.model.norm.float()
    expected, found = plain.model.norm(x), patched.model.norm(x)
    assert found.dtype == expected.dtype == torch.float32 and torch.equal(found, expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu", "relu"])
def test_activation_is_proved_not_guessed(activation):
    plain, patched = tiny.pair("llama", hidden_act=activation, mlp_bias=True)
    x = torch.randn(2, 5, 64)
    assert torch.equal(patched.model.layers[0].mlp(x), plain.model.layers[0].mlp(x))
    op = {"gelu": "geglu", "gelu_pytorch_tanh": "geglu", "silu": "swiglu"}.get(activation)
    match = getattr(type(patched.model.layers[0].mlp), "liger_match", None)
    assert (match and match.op) == op

"""Classes and functions that liger_kernel has for one family each, against the family's own."""

import pickle
import types

import pytest
import tiny
import torch

from liger_hw.patching import output_classes
from liger_hw.transformers import family_modules, functional, loss_utils, rotary_names

transformers = tiny.transformers
CONFIG = dict(hidden_size=32, intermediate_size=48, hidden_act="silu", hidden_activation="silu", mlp_bias=False)
CONFIG |= dict(mlp_multipliers=(0.7, 1.3), pretraining_tp=1, num_hidden_layers=3, num_kv_shared_layers=1)
CONFIG = types.SimpleNamespace(**CONFIG, use_double_wide_mlp=True, layer_types=["full_attention"] * 3)


def of(family, name):
    return getattr(__import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name]), name)


def same(ours, theirs, *inputs):
    """Equal bits in bf16 and equal gradients in fp32."""
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours.load_state_dict(theirs.state_dict())
    found, expected = ours(*inputs), theirs(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    a, b = (torch.autograd.grad(y.square().sum(), list(m.parameters())) for y, m in ((found, ours), (expected, theirs)))
    for p, q in zip(a, b):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)
    half = [x.bfloat16() for x in inputs]
    assert torch.equal(ours.bfloat16()(*half), theirs.bfloat16()(*half))


@pytest.mark.parametrize(
    "name, family, theirs",
    [
        ("LigerPhi3SwiGLUMLP", "phi3", "Phi3MLP"),
        ("LigerFalconH1SwiGLUMLP", "falcon_h1", "FalconH1MLP"),
        ("LigerFalconH1MLP", "falcon_h1", "FalconH1MLP"),
        ("LigerQwen3MoeSwiGLUMLP", "qwen3_moe", "Qwen3MoeMLP"),
        ("LigerMLP", "llama", "LlamaMLP"),
        ("LigerHunyuanV1SwiGLUMLP", "hunyuan_v1_dense", "HunYuanDenseV1MLP"),
        ("LigerTiledSwiGLUMLP", "llama", "LlamaMLP"),
        ("LigerSwiGLUMLPForMuseGlimmer", "llama", "LlamaMLP"),
    ],
)
def test_mlps(name, family, theirs):
    x = torch.randn(2, 70, 32)
    same(getattr(family_modules, name)(CONFIG), of(family, theirs)(CONFIG), x)


def test_mlps_that_transformers_has_no_longer():
    x, ours = torch.randn(2, 5, 32), family_modules.LigerBlockSparseTop2MLP(CONFIG)
    expected = ours.w2(torch.nn.functional.silu(ours.w1(x)) * ours.w3(x))
    torch.testing.assert_close(ours(x), expected)
    widths = [family_modules.LigerGEGLUMLPForGemma4(CONFIG, i).gate_proj.out_features for i in (None, 0, 1, 2)]
    assert widths == [48, 48, 48, 96]
    pieces = family_modules.LigerTiledGEGLUMLP(CONFIG, num_shards=3)
    whole = pieces.down_proj(torch.nn.functional.gelu(pieces.gate_proj(x), approximate="tanh") * pieces.up_proj(x))
    torch.testing.assert_close(pieces(x), whole)


@pytest.mark.parametrize(
    "name", [n for n in vars(family_modules) if n.startswith("Liger") and "MLP" in n and "GEGLU" not in n]
)
def test_mlps_refuse_another_activation(name):
    config = types.SimpleNamespace(**vars(CONFIG) | {"hidden_act": "gelu", "hidden_activation": "gelu"})
    with pytest.raises(ValueError, match="hidden_act"):
        getattr(family_modules, name)(config)


@pytest.mark.parametrize(
    "name, family, theirs",
    [
        ("LigerRMSNormForGemma", "gemma", "GemmaRMSNorm"),
        ("LigerRMSNormForGemma2", "gemma2", "Gemma2RMSNorm"),
        ("LigerRMSNormForGemma3", "gemma3", "Gemma3RMSNorm"),
        ("LigerRMSNormForQwen3Next", "qwen3_next", "Qwen3NextRMSNorm"),
        ("LigerRMSNormForGlm4", "glm4", "Glm4RMSNorm"),
    ],
)
def test_norms(name, family, theirs):
    same(getattr(family_modules, name)(32), of(family, theirs)(32), torch.randn(2, 5, 32))


def test_norms_without_a_weight():
    x = torch.randn(2, 5, 32)
    for norm in (
        family_modules.LigerRMSNormForGemma4(32, with_scale=False),
        family_modules.LigerRMSNormForMuseGlimmer(with_scale=False),
    ):
        assert not list(norm.parameters())
        torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (32,), eps=1e-6))


def test_rotary_functions():
    q, k = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16)
    angle = torch.randn(2, 5, 8)
    gpt_oss = of("gpt_oss", "apply_rotary_pos_emb")
    expected = gpt_oss(q, k, angle.cos(), angle.sin())
    torch.testing.assert_close(rotary_names.liger_rotary_pos_emb_gpt_oss(q, k, angle.cos(), angle.sin()), expected)
    half = functional.liger_rope(q, k, angle.cos(), angle.sin(), rotary_dim=16)
    torch.testing.assert_close(half, expected)
    with pytest.raises(ValueError, match="rotary_dim"):
        functional.liger_rope(q, k, angle.cos(), angle.sin(), rotary_dim=12)
    xq, xk, freqs = q.transpose(1, 2), k.transpose(1, 2), torch.polar(torch.ones(2, 5, 8), angle)
    theirs = of("llama4", "apply_rotary_emb")(xq, xk, freqs)
    torch.testing.assert_close(rotary_names.liger_llama4_text_rotary_pos_emb(xq, xk, freqs), theirs)
    theirs = of("llama4", "vision_apply_rotary_emb")(xq, xk, freqs[:1])
    torch.testing.assert_close(rotary_names.liger_llama4_vision_rotary_pos_emb(xq, xk, freqs[0]), theirs)
    full = angle[0].repeat(1, 2)
    args = xq[0].bfloat16(), xk[0].bfloat16(), full.cos(), full.sin()
    for ours, theirs in zip(
        rotary_names.liger_rotary_pos_emb_vision(*args), of("qwen2_5_vl", "apply_rotary_pos_emb_vision")(*args)
    ):
        assert torch.equal(ours, theirs)


def test_rotary_tables_by_section():
    q, k, angle = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(3, 2, 5, 8).repeat(1, 1, 1, 2)
    sections = [2, 3, 3]
    cos = torch.empty(2, 5, 16)
    sin = torch.empty(2, 5, 16)
    for j in range(16):  # Qwen2-VL: time, height and width take turns along the half of a head, twice
        part = [0] * 2 + [1] * 3 + [2] * 3
        cos[..., j], sin[..., j] = angle[part[j % 8], ..., j].cos(), angle[part[j % 8], ..., j].sin()
    found = rotary_names.liger_multimodal_rotary_pos_emb(q, k, angle.cos(), angle.sin(), sections)
    torch.testing.assert_close(found, functional.liger_rope(q, k, cos, sin))


def test_loss_of_hidden_states():
    from transformers.loss.loss_utils import ForCausalLMLoss

    hidden, weight = torch.randn(2, 7, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    labels = torch.randint(31, (2, 7))
    labels[0, :3] = -100
    for options in ({}, {"num_items_in_batch": 5}, {"shift_labels": labels}):
        expected = ForCausalLMLoss(hidden @ weight.T, labels, 31, **options)
        found = loss_utils.LigerForCausalLMLoss(hidden, weight, labels, 8, cu_seq_lens_q=None, **options)
        torch.testing.assert_close(found, expected)
    rows = torch.nn.functional.cross_entropy(
        hidden[:, :-1].reshape(12, 8) @ weight.T, labels[:, 1:].reshape(-1), reduction="none"
    )
    expected = (rows * torch.arange(14.0).reshape(2, 7)[:, 1:].reshape(-1)).sum() / (labels[:, 1:] != -100).sum()
    found = loss_utils.LigerForCausalLMLoss(hidden, weight, labels, 8, token_weights=torch.arange(14.0).reshape(2, 7))
    torch.testing.assert_close(found, expected)
    for name, value in {"token_weights": torch.ones(2, 6), "reduction": "sum"}.items():
        with pytest.raises(ValueError, match=f"^{name}: got"):
            loss_utils.LigerForCausalLMLoss(hidden, weight, labels, 8, **{name: value})
    result = loss_utils.LigerForCausalLMLoss(hidden, weight, labels, 8, return_token_accuracy=True)
    loss, z_loss, accuracy, predicted = loss_utils.unpack_cross_entropy_result(result)
    assert torch.equal(loss, result.loss) and 0 <= accuracy <= 1 and z_loss is predicted is None
    assert loss_utils.unpack_cross_entropy_result(loss) == (loss, None, None, None)


def test_output_classes():
    cls = output_classes.LigerCausalLMOutputWithPast
    out = cls(loss=torch.ones(()), token_accuracy=torch.tensor(0.5))
    assert (
        isinstance(out, transformers.modeling_outputs.CausalLMOutputWithPast)
        and list(out.keys())[-1] == "token_accuracy"
    )
    assert cls is output_classes.LigerCausalLMOutputWithPast and out["token_accuracy"] == 0.5 and out.logits is None
    assert output_classes.LigerGemma3CausalLMOutputWithPast.__mro__[1].__name__ == "Gemma3CausalLMOutputWithPast"
    assert output_classes.LigerPaliGemmaCausalLMOutputWithPast(predicted_tokens=torch.ones(2))[0].sum() == 2
    with pytest.raises(AttributeError, match="UnheardOf"):
        output_classes.LigerUnheardOfCausalLMOutputWithPast  # noqa: B018
    with pytest.raises(AttributeError):
        output_classes.unheard_of  # noqa: B018


def test_patched_models_return_them():
    _, model = tiny.pair()
    plain = model(**tiny.tokens())
    found = model(**tiny.tokens(), return_token_accuracy=True, return_predicted_tokens=True)
    assert type(plain) is transformers.modeling_outputs.CausalLMOutputWithPast
    assert type(found) is output_classes.LigerCausalLMOutputWithPast
    assert found["predicted_tokens"].shape == (34,) and found["token_accuracy"] is found.token_accuracy
    found.logits = None
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again.predicted_tokens, found.predicted_tokens)
    leaves, spec = torch.utils._pytree.tree_flatten(found)  # as DDP and FSDP take it apart
    assert type(torch.utils._pytree.tree_unflatten(leaves, spec)) is type(found)

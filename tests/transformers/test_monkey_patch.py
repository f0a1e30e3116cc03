"""Run every `apply_liger_kernel_to_*` on a model, and on later models of its family."""

import inspect

import pytest
import tiny
import zoo

import liger_hw
from liger_hw.patching import swapping
from liger_hw.transformers import monkey_patch
from liger_hw.transformers.families import FAMILIES, MODEL_TYPES

transformers = tiny.transformers
REFUSED_ELSEWHERE = {  # what liger_kernel raises for, warns of or leaves out
    "glm4": {"rope": True},
    "gpt_oss": {"swiglu": True},
    "granite": {"fused_linear_cross_entropy": True},
    "nemotron": {"rope": True},
    "qwen3_next": {"rope": True},
}


def kinds(model):
    return {type(m).liger_match.kind for m in model.modules() if swapping.is_swapped(m)}


def function_of(family):
    return getattr(monkey_patch, f"apply_liger_kernel_to_{family}")


@pytest.mark.parametrize("family", REFUSED_ELSEWHERE)
def test_families_that_are_refused_elsewhere(family):
    layers = (
        {"layer_types": ["full_attention"] * 2, "num_experts": 4, "num_experts_per_tok": 2}
        if family == "qwen3_next"
        else {}
    )
    plain, patched = tiny.model(family, **layers), tiny.model(family, **layers)
    function_of(family)(**REFUSED_ELSEWHERE[family], model=patched)
    assert {"head", "causal_lm"} < kinds(patched)
    if REFUSED_ELSEWHERE[family].get("rope"):
        assert "rope" in kinds(patched)
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


@pytest.mark.parametrize("model_type", ["granite", "llama", "cohere2"])
def test_by_model_type_before_there_is_a_model(model_type):
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
    cls = type(tiny.model(model_type))
    try:
        apply(rms_norm=None, rope=None)  # as Axolotl calls it
        assert "mlp" in kinds(tiny.model(model_type)) and "rope" not in kinds(tiny.model(model_type))
    finally:
        liger_hw.unpatch(cls)
    assert not kinds(tiny.model(model_type))


def test_defaults_of_families():
    granite, llama = tiny.model("granite"), tiny.model("llama")
    monkey_patch.apply_liger_kernel_to_granite(model=granite)
    assert dict(type(granite).liger_match.options) == {"cross_entropy": True, "fused_linear_cross_entropy": False}
    with pytest.raises(ValueError, match="fused_linear_cross_entropy"):
        monkey_patch.apply_liger_kernel_to_llama(cross_entropy=True, model=llama)
    with pytest.raises(ValueError, match="geglu"):
        monkey_patch.apply_liger_kernel_to_llama(geglu=True, model=llama)
    with pytest.raises(ValueError, match="rope"):
        monkey_patch.apply_liger_kernel_to_llama(True, rope=True, model=llama)
    with pytest.raises(ValueError, match="unheard_of"):
        monkey_patch.apply_liger_kernel_to_llava(unheard_of=True, model=llama)
    assert not kinds(llama)


def test_every_model_type_has_its_function():
    table = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    assert set(table) >= set(MODEL_TYPES) and len(FAMILIES) == 45
    for model_type, family in MODEL_TYPES.items():
        assert table[model_type] is function_of(family)
    assert "stablelm" in table and "unheard_of" not in table and table.get("unheard_of") is None
    assert "rope" in inspect.signature(table["stablelm"]).parameters
    with pytest.raises(KeyError):
        table["unheard_of"]


def test_every_family_is_found_in_this_transformers():
    known = transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES
    for model_type in set(MODEL_TYPES) & set(known):
        assert issubclass(monkey_patch.class_of(model_type), transformers.PreTrainedModel)


def test_an_auto_class_of_pictures():
    config = zoo.config(transformers.LlavaConfig)
    model = liger_hw.transformers.AutoLigerKernelForImageTextToText.from_config(config, rms_norm=False)
    assert {"head", "causal_lm", "mlp"} < kinds(model)
    assert not any("RMSNorm" in type(m).__name__ and swapping.is_swapped(m) for m in model.modules())

"""Every language model of transformers that can be made tiny, against itself patched.

A few of each kind by default; `--models all` for all of them, of which `--shard 1/4` runs a quarter.
"""

import compare
import pytest
import zoo

FEW = """
afmoe apertus arcee aria_text bamba bloom cohere2 deepseek_v3 diffllama falcon falcon_h1 gemma2 gemma3 gemma3n_text glm4
glm4_moe gpt2 gpt_oss granite granitemoe helium llama llama4_text llava mimo_v2_flash minimax mistral3 mixtral
nanochat nemotron_h olmo olmo2 olmoe opt paligemma persimmon phi3 phimoe qwen2_5_vl qwen2_moe qwen3 qwen3_5 qwen3_moe
qwen3_next qwen3_vl recurrent_gemma seed_oss smollm3 stablelm starcoder2 t5 t5gemma
bailing_hybrid bart gptj inkling2_text gpt_neo nemotron nemotron_h_omni phi qwen4_exp_text
""".split()


def pytest_generate_tests(metafunc):
    rows = zoo.rows()
    if metafunc.config.getoption("models", "few") == "few":
        rows = [(model_type, cls) for model_type, cls in rows if model_type in FEW]
    part, parts = map(int, metafunc.config.getoption("shard", "1/1").split("/"))
    rows = rows[part - 1 :: parts]
    metafunc.parametrize("model_type, cls", rows, ids=[f"{model_type}-{cls}" for model_type, cls in rows])


def test_patched_learns_as_plain(model_type, cls):
    try:
        found = compare.row(model_type, cls)
    except zoo.NotTiny as error:
        pytest.skip(str(error))
    assert not found["mismatch"], found
    assert found["replaced"], found
    assert found["fused"] or _has_no_such_tail(found), found["left"]


def _has_no_such_tail(found):
    """Its forward writes to its logits, computes no cross entropy, or has no head that is a linear layer alone."""
    reasons = [reason.partition(": ")[2] for reason in found["left"] if reason.startswith(f"{found['class']}: ")]
    writes = found["model_type"] == "chameleon"  # over those of pictures
    return writes or any(why.startswith(("its forward computes no cross entropy", "its head is a ")) for why in reasons)

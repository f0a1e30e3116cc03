"""Every language model of transformers that can be made tiny, against itself patched.

A few that show every treatment of a part, by default; `--models all` for all of them, of which `--shard 1/4` runs a
quarter.
"""

import json
from pathlib import Path

import compare
import pytest
import zoo

# Every reason of docs/models.json why a part was replaced, and how, or left; and a few that everybody trains.
FEW = """
apertus axk2 bailing_hybrid bamba cohere2 deepseek_v4 dory ernie4_5 fsmt fun_asr_nano gemma2 gemma3n_text glmga
gpt_oss gptj helium idefics idefics3 inkling_text lara_mini llama llama4 llama4_text llava mistral3 mixtral mpt
musicflamingo musicgen_melody nanochat nemotron olmo opt phi phi4_multimodal qwen2_5_vl qwen3_next rwkv step3p7
t5 video_llama_3 xlm xlnet
""".split()
PAGE = Path(__file__).parents[2] / "docs" / "models.json"


def pytest_generate_tests(metafunc):
    if "model_type" not in metafunc.fixturenames:
        return
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


@pytest.mark.skipif(not PAGE.exists(), reason="docs/ is not here")
def test_the_few_show_whatever_happens_to_a_part():
    def happened(rows):
        return {
            what
            for row in rows
            for what in (*row["replaced"], *(reason.partition(": ")[2] for reason in row["left"]), row["fused"])
        }

    rows = json.loads(PAGE.read_text())["models"]
    assert not happened(rows) - happened(row for row in rows if row["model_type"] in FEW)


def _has_no_such_tail(found):
    """Its forward writes to its logits, computes no cross entropy, or has no head that is a linear layer alone."""
    reasons = [reason.partition(": ")[2] for reason in found["left"] if reason.startswith(f"{found['class']}: ")]
    writes = found["model_type"] == "chameleon"  # over those of pictures
    return writes or any(why.startswith(("its forward computes no cross entropy", "its head is a ")) for why in reasons)

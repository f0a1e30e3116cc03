"""Tiny Hugging Face models that hide nothing, compared with their patched copies by alike.py."""

import copy
import importlib.util
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import alike
import pytest
import torch

if importlib.util.find_spec("transformers") is None:  # not importorskip, which also skips where importing it fails
    pytest.skip("the package transformers is not installed", allow_module_level=True)

import transformers  # noqa: E402

from liger_hw import patch  # noqa: E402
from liger_hw.patching.lazy_logits import LazyLogits  # noqa: E402

VOCABULARY = 128
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TINY |= dict(head_dim=16, vocab_size=VOCABULARY, max_position_embeddings=64)
TINY |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
IS_4 = transformers.__version__ < "5"
fails_in_4 = pytest.mark.skipif(IS_4, reason="the unpatched model of transformers 4 raises an error")
LOGIT_KNOBS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


def model(family="llama", dtype=torch.float32, seed=0, **config):
    """Build a plain model with perturbed norm weights and logit scales, which show errors."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = transformers.AutoConfig.for_model(family, **TINY | config)
        for knob in LOGIT_KNOBS:
            if hasattr(config, knob):
                setattr(config, knob, 0.7)
        plain = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        for p in plain.parameters():
            p.data += 0.3 * torch.randn_like(p)
    return plain.train()


def pair(family="llama", dtype=torch.float32, flags=(), **config):
    """A plain model and its patched copy."""
    plain = model(family, dtype, **config)
    patched = copy.deepcopy(plain)
    patch(patched, **dict(flags))
    return plain, patched


def tokens(batch=2, length=17, seed=0):
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def call(model, **inputs):
    torch.manual_seed(1)  # for dropout
    return model(**inputs, use_cache=False)


def is_lazy(outputs):
    """Whether the logits of a forward were never computed."""
    return isinstance(outputs.logits, LazyLogits) and outputs.logits.cell.values is None


def assert_learns_alike(plain, patched, fused=True, **inputs):
    """Assert equal loss and gradients by the rule of alike.py; return both outputs."""
    reference = alike.Reference(plain, lambda model: call(model, **inputs))
    found = alike.step(patched, lambda model: call(model, **inputs))
    assert is_lazy(found.outputs) == fused, "the logits were computed" if fused else "the logits were not computed"
    reference.assert_same(found)
    return reference.step.outputs, found.outputs

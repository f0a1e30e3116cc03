"""Every public name exists and is documented. The names of liger_kernel: tests/integrations/test_names.py."""

import doctest
import importlib
import inspect

import pytest
import torch

import liger_hw
import liger_hw.transformers

OPTIONAL = {"pytorch_lightning", "transformers"}

PACKAGES = ("liger_hw", "liger_hw.chunked_loss", "liger_hw.integrations", "liger_hw.transformers")
NAMES = [(package, name) for package in PACKAGES for name in importlib.import_module(package).__all__]


@pytest.mark.parametrize("package, name", NAMES)
def test_public_names_exist_and_are_documented(package, name):
    module = importlib.import_module(package)
    assert name in dir(module)
    try:
        thing = getattr(module, name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert (inspect.getdoc(thing) or "").strip(), f"{name} has no docstring"


@pytest.fixture(scope="module")
def model():
    """Return a model for the examples, or None without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError:
        return None
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


@pytest.mark.parametrize("package, name", [pair for pair in NAMES if pair[0] in ("liger_hw", "liger_hw.integrations")])
def test_the_example_of_a_public_name_runs(package, name, model):
    try:
        text = inspect.getdoc(getattr(importlib.import_module(package), name))
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    if model is None and "model" in text.partition("Examples:")[2]:
        pytest.skip("transformers is not installed")
    names = {"torch": torch, "liger_hw": liger_hw, "model": model}
    example = doctest.DocTestParser().get_doctest(text, names, name, None, None)
    assert example.examples, f"{name} has no example"
    printed = []
    assert not doctest.DocTestRunner().run(example, out=printed.append).failed, "".join(printed)


def test_unknown_names_are_attribute_errors():
    for package in (liger_hw, liger_hw.transformers):
        with pytest.raises(AttributeError, match="unheard_of"):
            package.unheard_of  # noqa: B018

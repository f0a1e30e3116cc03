"""Every public name exists and is documented. The names of liger_kernel: tests/integrations/test_names.py."""

import importlib
import inspect

import pytest

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


def test_unknown_names_are_attribute_errors():
    for package in (liger_hw, liger_hw.transformers):
        with pytest.raises(AttributeError, match="unheard_of"):
            package.unheard_of  # noqa: B018

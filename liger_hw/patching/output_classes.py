"""Define output classes of language models that also hold by-products of the fused loss.

`Liger<Name>` exists for any output class `<Name>` of transformers. It adds two fields: `token_accuracy` (the share of
labels that equal the likeliest token, fp32 scalar) and `predicted_tokens` (int64, one per label, -1 where the label is
ignored).
"""

import dataclasses
import functools
import importlib
import pkgutil

from transformers import modeling_outputs, models


@functools.cache
def with_by_products(output_class):
    """Return the subclass of `output_class` with the two fields."""
    name = f"Liger{output_class.__name__}"
    fields = [(field, object, dataclasses.field(default=None)) for field in ("token_accuracy", "predicted_tokens")]
    subclass = dataclasses.make_dataclass(name, fields, bases=(output_class,), namespace={"__module__": __name__})
    subclass.__doc__ = f"`{output_class.__name__}` with `token_accuracy` and `predicted_tokens`."
    return subclass


def __getattr__(name):
    base = name.removeprefix("Liger")
    output_class = None
    if name != base and "Output" in name:
        output_class = getattr(modeling_outputs, base, None) or _from_family(base)
    if output_class is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: transformers has no {base}")
    return with_by_products(output_class)


def _from_family(name):
    """Return the class `name` from the family whose name it starts with, or None."""
    lower = name.replace("_", "").lower()
    families = [family.name for family in pkgutil.iter_modules(models.__path__)]
    for family in sorted(families, key=len, reverse=True):  # the longest name first: qwen2_5_vl before qwen2
        if lower.startswith(family.replace("_", "")):
            module = importlib.import_module(f"{models.__name__}.{family}.modeling_{family}")
            if hasattr(module, name):
                return getattr(module, name)

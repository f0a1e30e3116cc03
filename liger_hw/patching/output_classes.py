"""Define output classes of language models that also hold by-products of the fused loss.

`Liger<Name>` exists for any output class `<Name>` of transformers. It adds three fields: `token_accuracy` (the share of
labels that equal the likeliest token, fp32 scalar), `predicted_tokens` (int64, one per label, -1 where the label is
ignored) and `entropy` (the mean entropy of labels' distributions in nats, fp32 scalar).
"""

import dataclasses
import functools
import importlib
import pkgutil

from transformers import modeling_outputs, models


@functools.cache
def with_by_products(output_class):
    """Return the subclass of `output_class` with the three fields."""
    name = f"Liger{output_class.__name__}"
    names = "token_accuracy", "predicted_tokens", "entropy"
    fields = [(field, object, dataclasses.field(default=None)) for field in names]
    subclass = dataclasses.make_dataclass(name, fields, bases=(output_class,), namespace={"__module__": __name__})
    subclass.__doc__ = f"`{output_class.__name__}` with `token_accuracy`, `predicted_tokens` and `entropy`."
    return subclass


def without_by_products(outputs):
    """Return a model's outputs as an instance of the class of transformers."""
    if type(outputs).__module__ != __name__:
        return outputs
    names = {field.name for field in dataclasses.fields(type(outputs).__base__)}
    return type(outputs).__base__(**{name: value for name, value in outputs.items() if name in names})


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

"""Describe the op that computes a module, and the attributes that hold the op's arguments."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from liger_hw.dispatch.ops import compiler_fuses
from liger_hw.patching.pins import digest, functions_in, guard
from liger_hw.patching.reading import Pin, add_entries, read, read_function


@dataclass(frozen=True)
class Match:
    """An op, its options and the module's attributes with which it computes the module.

    Attributes:
        kind: "norm", "gated_norm", "mlp", "activation", "experts", "sorted_experts", "rope", "lora",
            "lora_parameter", "head", "lora_head", "causal_lm" or "skip_logits".
        inputs: names of the inputs that the replacement of the forward takes, where its guard also tells whether the
            arguments of a call are these.
        op: the name of the op, or "" where `kind` already determines it.
        options: keyword arguments of the op, as sorted pairs.
        names: (role, attribute of the module) pairs; the attribute is None where the module has no such part.
        pinned: `AttributePin`s: the match holds only while the module's attributes have these values.
        bypassed: (child, its class) pairs: activations and dropouts that the replacement may skip.
        methods: the methods of the module whose code was matched.
    """

    kind: ClassVar[str]
    inputs: ClassVar[tuple] = ()
    op: str = ""
    options: tuple = ()
    names: tuple = ()
    pinned: tuple = ()
    bypassed: tuple = ()
    methods: tuple = ("forward",)

    @classmethod
    def of(cls, op, options, names, **more):
        """Build the match of an op (a function) from dictionaries of options and names."""
        return cls(op.__name__, tuple(sorted(options.items())), tuple(names.items()), **more)

    @property
    def strings(self):
        """Return the values of pinned attributes that may be names of entries in a registry."""
        return {pin.value for pin in self.pinned if isinstance(pin.value, str)}

    def codes(self, original):
        """Return the `Code` of everything that computes a module: methods, children, functions in attributes."""
        functions = dict.fromkeys(f for pin in self.pinned for f in functions_in(pin.value))
        codes = read(original, self.methods), *(read(cls) for _, cls in self.bypassed), *map(read_function, functions)
        return [add_entries(code, self.strings) for code in codes]

    def pins(self, original):
        """Return (`Pin`s, names that an attribute of an instance would hide) of the matched code."""
        codes = self.codes(original)
        shadowed = {pin.name for pin in codes[0].pins if pin.owner is original} - {*self.methods}
        shadowed |= {name for name, _ in self.bypassed}
        pins = [pin for code in codes for pin in code.pins]
        return pins + [Pin(cls, "__call__", cls.__call__) for _, cls in self.bypassed], shadowed

    def reason_against(self, original):
        """Return why the op cannot compute modules of `original` though a probe agrees, or None."""

    def digest(self, original):
        """Return a text that tells the matched code from other code."""
        return digest(self.pins(original)[0])

    def guard(self, original):
        """Return the function that tells whether an instance of `original` is still what was matched."""
        pins, shadowed = self.pins(original)
        hidden = {
            name: {pin.name for pin in read(cls).pins if pin.owner is cls} - {"forward"} for name, cls in self.bypassed
        }
        return guard(pins, self.pinned, {None: shadowed, **hidden}, self.bypassed, (original,), self.inputs)

    def members(self, original, unchanged):
        """Return name -> value of the subclass of `original` that computes with the op.

        Args:
            unchanged: the function that `guard` returned, of a module, and of a call's arguments if there are `inputs`.
        """
        raise NotImplementedError

    def shown_options(self):
        """Return the options as a summary shows them."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options)

    def __str__(self):
        name, options = self.op or self.kind, self.shown_options()
        return f"{name}({options})" if options else name


def compiles_by_itself(args, kwargs=None, wider=1) -> bool:
    """Tell whether torch.compile computes a patched module of small tensors by the module's code.

    That code is what the compiler would fuse anyway, and guards of what was matched cost host time.
    """
    first = next((x for x in (*args, *(kwargs or {}).values()) if torch.is_tensor(x)), None)
    return first is not None and compiler_fuses(first, wider)


def in_memory_order(function, x, *args):
    """Return `function(x, *args)` in the memory order of x.

    Operations by element keep it, while the results of `function` are contiguous.
    """
    if x.is_contiguous():
        return function(x, *args)
    order, strides = list(range(x.ndim)), x.stride()
    dims = sorted(order, key=lambda dim: -strides[dim])
    if dims == order or 0 in strides:
        return function(x, *args)
    back = [dims.index(dim) for dim in order]
    if dims[-1] == order[-1]:  # rows of x are rows of its memory
        return function(x.permute(dims), *args).permute(back)
    return function(x, *args).permute(dims).contiguous().permute(back)


def remember(results, key, find):
    """Return `results[key]`, which `find` computes at its first use."""
    if key not in results:
        results[key] = find()
    return results[key]

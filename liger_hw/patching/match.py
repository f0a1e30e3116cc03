"""Describe the op that computes a module, and the attributes that hold the op's arguments."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Match:
    """An op, its options and the module's attributes with which it computes the module.

    Attributes:
        kind: "norm", "gated_norm", "mlp", "activation", "experts", "sorted_experts", "rope", "head" or "causal_lm".
        op: the name of the op, or "" where `kind` already determines it.
        options: keyword arguments of the op, as sorted pairs.
        names: (role, attribute of the module) pairs; the attribute is None where the module has no such part.
    """

    kind: ClassVar[str]
    op: str = ""
    options: tuple = ()
    names: tuple = ()

    @classmethod
    def of(cls, op, options, names, **more):
        """Build the match of an op (a function) from dictionaries of options and names."""
        return cls(op.__name__, tuple(sorted(options.items())), tuple(names.items()), **more)

    def members(self, original):
        """Return name -> value of the subclass of `original` that computes with the op."""
        raise NotImplementedError

    def shown_options(self):
        """Return the options as a summary shows them."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options)

    def __str__(self):
        name, options = self.op or self.kind, self.shown_options()
        return f"{name}({options})" if options else name

"""What recognition proves of a module: the op that computes it, and where the module keeps that op's arguments."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Match:
    """An op, with the options and attributes by which it computes what a class computes.

    Attributes:
        kind: "norm", "gated_norm", "mlp", "activation", "experts", "sorted_experts", "rope", "head" or "causal_lm".
        op: the name of the op, or "" where the kind says it.
        options: keyword arguments of the op, as sorted pairs.
        names: role -> attribute of the module that plays it, as pairs; None where the module has no such part.
    """

    kind: ClassVar[str]
    op: str = ""
    options: tuple = ()
    names: tuple = ()

    @classmethod
    def of(cls, op, options, names, **more):
        """The match of an op (a function) with dictionaries of options and names."""
        return cls(op.__name__, tuple(sorted(options.items())), tuple(names.items()), **more)

    def members(self, original):
        """The attributes of the subclass of `original` that computes with the op: name -> value."""
        raise NotImplementedError

    def shown_options(self):
        """The options as a summary shows them."""
        return ", ".join(f"{name}={value!r}" for name, value in self.options)

    def __str__(self):
        name, options = self.op or self.kind, self.shown_options()
        return f"{name}({options})" if options else name

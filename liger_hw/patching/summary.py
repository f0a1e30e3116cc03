"""Summarise the effect of `patch` on a model, as counts and as a table."""

from collections import Counter
from dataclasses import dataclass, field

from liger_hw import console

DESCRIPTIONS = {  # part of a loss -> its description in the table
    "head": "output layer: its logits are computed only if they are read",
    "causal_lm(cross_entropy=False, fused_linear_cross_entropy=True)": "loss: computed without logits",
    "causal_lm(cross_entropy=True, fused_linear_cross_entropy=False)": "loss: cross_entropy of the logits",
}


@dataclass
class Summary:
    """Counts of the modules that `patch` replaced and left.

    Attributes:
        replaced: (class name, op with its options) -> number of modules.
        left: (class name, reason) -> number of modules that `patch` left, though their names suggest an op.
        activations: the `Activations` of a budget, or None.
    """

    replaced: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)
    activations: object = None

    def __str__(self):
        replaced = [(name, count, DESCRIPTIONS.get(op, op)) for (name, op), count in self.replaced.items()]
        left = [(name, count, reason) for (name, reason), count in self.left.items()]
        tables = [
            console.table(("module", "count", header), rows)
            for header, rows in (("replaced by", replaced), ("left alone because", left))
            if rows
        ]
        if not tables:
            return "it has no module that an op could serve"
        return "\n\n".join([*tables, f"{self.replaced.total()} modules replaced, {self.left.total()} left alone"])

"""What `patch` did to a model, as counts and as a table to read."""

from collections import Counter
from dataclasses import dataclass, field

WORDS = {  # how the table says the parts of a loss
    "head": "output layer: its logits are computed only if they are read",
    "causal_lm(cross_entropy=False, fused_linear_cross_entropy=True)": "loss: computed without logits",
    "causal_lm(cross_entropy=True, fused_linear_cross_entropy=False)": "loss: cross_entropy of the logits",
}


@dataclass
class Summary:
    """What `patch` did.

    Attributes:
        replaced: (class name, op with its options) -> number of modules.
        left: (class name, reason) -> number of modules that look as if an op could serve them and were left alone.
    """

    replaced: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)

    def tables(self):
        """(header, rows) of what was replaced and of what was left alone, all cells as text; empty ones left out."""
        replaced = [(name, str(count), WORDS.get(op, op)) for (name, op), count in self.replaced.items()]
        left = [(name, str(count), reason) for (name, reason), count in self.left.items()]
        tables = (("module", "count", "replaced by"), replaced), (("module", "count", "left alone because"), left)
        return [(header, rows) for header, rows in tables if rows]

    def __str__(self):
        tables = self.tables()
        cells = [row for header, rows in tables for row in (header, *rows)]
        name_width, count_width = (max((len(row[i]) for row in cells), default=0) for i in (0, 1))
        lines = [
            [f"{name:{name_width}}  {count:>{count_width}}  {text}" for name, count, text in (header, *rows)]
            for header, rows in tables
        ]
        return "\n\n".join("\n".join(table) for table in lines) or "no module that an op could serve"

"""Choose launch configurations: heuristics by the decorator `tuned`, and tables that override them.

    @tuned
    def rms_norm_forward_config(cols, itemsize, device) -> Config:      # pure: numbers and a Device in, Config out
        return ...

A heuristic computes a configuration from facts of the device. Exceptions, measured or forced by a compiler, are entries
of tables: this machine's, and those shipped in `tables/`, one file for each architecture.

Precedence: this machine's table, the shipped one, the heuristic. Within a table an entry for the heuristic's exact
numbers precedes one for their class of widths. `X_config` is the configuration of the kernel `X` in the same file,
"X(4096, 2)" the key of its entry for the numbers 4096 and 2. An entry is valid for the hash of that kernel's code.
Under another version of Triton the first launch checks that the kernel still fits and spills nothing, and falls back
to the heuristic with one warning.

`config.py` says what a configuration is, `entries.py` reads tables, `choice.py` makes the choice, `search.py`
measures and writes. `liger_lab/contribution.py` checks tables before they are shipped.
"""

from liger_hw.tuning import choice, entries, search
from liger_hw.tuning.choice import LaunchFailed, tuned, withdraw
from liger_hw.tuning.config import COMPILED, HEURISTIC, LOCAL, MEASURED, SHIPPED, Config, power_of_2, row_warps

__all__ = [
    "COMPILED", "HEURISTIC", "LOCAL", "MEASURED", "SHIPPED", "Config", "LaunchFailed", "choice", "entries",
    "power_of_2", "row_warps", "search", "tuned", "withdraw",
]  # fmt: skip

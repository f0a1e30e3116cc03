"""The decorator `tuned` makes a function the heuristic of a launch configuration; measured winners override it.

    @tuned
    def rms_norm_forward_config(cols, itemsize, device) -> Config:      # pure: numbers and a Device in, Config out
        return ...

Order: a winner measured on this machine, a winner shipped with the package, the heuristic. `X_config` is the
configuration of the kernel `X` in the same file, "X(4096, 2)" the key of its winners for one shape; a winner is used
only while that kernel's code and Triton are what was measured.

`config.py` says what a configuration is, `tables.py` reads the winners, `choice.py` makes the choice, and `search.py`
measures and writes.
"""

from liger_hw.tuning.choice import CONFIGS, Refused, forget, override, refuse, tuned
from liger_hw.tuning.config import HEURISTIC, LOCAL, SHIPPED, Config, power_of_2, row_warps
from liger_hw.tuning.search import (
    autotuning,
    bench,
    calls_within,
    configurations_of,
    entry_for,
    neighbours,
    record,
    tune,
)  # fmt: skip
from liger_hw.tuning.tables import (
    cache_file,
    cache_folder,
    kernel_hash,
    launchable,
    measured_on,
    read_own,
    read_table,
    shipped_file,
    warn_once,
)  # fmt: skip

__all__ = [
    "CONFIGS", "HEURISTIC", "LOCAL", "SHIPPED", "Config", "Refused", "autotuning", "bench", "cache_file",
    "cache_folder", "calls_within", "configurations_of", "entry_for", "forget", "kernel_hash", "launchable",
    "measured_on", "neighbours", "override", "power_of_2", "read_own", "read_table", "record", "refuse",
    "row_warps", "shipped_file", "tune", "tuned", "warn_once",
]  # fmt: skip

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

from liger_hw.tuning.choice import (
    CONFIGS,
    LaunchFailed,
    forget,
    is_current,
    other_code,
    other_triton,
    override,
    tuned,
    withdraw,
)
from liger_hw.tuning.config import COMPILED, HEURISTIC, LOCAL, MEASURED, SHIPPED, Config, power_of_2, row_warps
from liger_hw.tuning.entries import (
    SHIPPED_TABLES,
    cache_file,
    cache_folder,
    kernel_hash,
    launchable,
    read_owned,
    read_table,
    shipped_file,
    warn_once,
    write_table,
)
from liger_hw.tuning.search import (
    autotuning,
    bench,
    calls_within,
    configurations_of,
    entry_for,
    measured_entry,
    neighbours,
    record,
    tune,
)

__all__ = [
    "COMPILED", "CONFIGS", "HEURISTIC", "LOCAL", "MEASURED", "SHIPPED", "SHIPPED_TABLES", "Config", "LaunchFailed",
    "autotuning", "bench", "cache_file", "cache_folder", "calls_within", "configurations_of", "entry_for", "forget",
    "is_current", "kernel_hash", "launchable", "measured_entry", "neighbours", "other_code", "other_triton", "override",
    "power_of_2", "read_owned", "read_table", "record", "row_warps", "shipped_file", "tune", "tuned", "warn_once",
    "withdraw", "write_table",
]  # fmt: skip

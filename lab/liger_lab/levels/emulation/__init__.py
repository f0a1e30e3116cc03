"""Execute AMD code objects without an AMD GPU, instruction by instruction.

`executed_on(device)` runs launches of ops on CPU tensors: it compiles each for the architecture, as `launches_on` does,
and executes the machine code on emulated waves.

Execution is in order: waits and hazards are not seen, nothing about time is. Registers and LDS begin as junk, and an
access to bytes that no tensor owns is a `Fault`. An instruction that the emulation does not know is an `Unknown`.
"""

from liger_lab.levels.emulation.launches import executed_on
from liger_lab.levels.emulation.machine import Fault
from liger_lab.levels.emulation.pseudocode import Unknown

__all__ = ["Fault", "Unknown", "executed_on"]

"""Execute AMD code objects without an AMD GPU, instruction by instruction.

`executed_on(device)` runs launches of ops on CPU tensors: it compiles each for the architecture, as `launches_on` does,
and executes the machine code on emulated waves.

Execution is in order: waits and hazards are not seen, nothing about time is. Registers and LDS begin as junk, and an
access to bytes that no tensor owns is a `Fault`. An instruction that the emulation does not know is an `Unknown`.

Why not tinygrad's emulator, whose decoders and pseudo-code are used here: it is `test/mockgpu/amd/{emu,pcode}.py` of
their repository, 170 kB, and in no package (the wheel of 0.14.0, the newest, and source distributions of 0.10.3 to
0.14.0 were searched). Its `run_asm` takes the address of a code object, a grid and arguments, so it could be driven. By
its source at commit 0094b93, it could not judge these kernels:

- a wave has 32 lanes: gfx9 has 64;
- no instruction has DPP, by which Triton's reductions exchange lanes; loads of buffers and MFMA are absent;
- memory is the whole process: a wrong address ends it or passes unseen, where a `Fault` names it;
- registers and LDS begin as zeros, which hides reads of bytes that nothing wrote;
- denormals are zero in every mode of a kernel, and WMMA truncates results in bf16;
- each instruction is compiled for the CPU by clang, and a copy would call internals of tinygrad that have no promise.
"""

from liger_lab.levels.emulation.launches import executed_on
from liger_lab.levels.emulation.machine import Fault
from liger_lab.levels.emulation.pseudocode import Unknown

__all__ = ["Fault", "Unknown", "executed_on"]

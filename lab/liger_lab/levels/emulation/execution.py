"""Execute a kernel's grid on emulated AMD waves, in order."""

from dataclasses import dataclass, field

import numpy as np

from liger_lab.levels.emulation.instructions import Decoder
from liger_lab.levels.emulation.machine import EXEC, SCALARS, SCRATCH, Arena, Lds, Waves

_BATCH = 64  # programs at a time: their registers are 8 MB a wave
LIMIT = 1_000_000  # instructions of a wave between barriers, above which a loop has no end


class Endless(RuntimeError):
    """A wave executed more instructions than any of our kernels does."""


@dataclass
class Run:
    """What happened.

    Attributes:
        counts: an instruction's name -> how often waves executed it.
        visited: the offset of each executed instruction from the first one -> `Instruction`.
        trace: the instructions of the first program's first wave, in order; empty unless `traced`.
        bank_passes, bank_least: of the first program, see `machine.Lds`; 0 unless `traced`.
    """

    traced: bool
    counts: dict = field(default_factory=dict)
    visited: dict = field(default_factory=dict)
    trace: list = field(default_factory=list)
    bank_passes: int = 0
    bank_least: int = 0


class Machine:
    """An emulated GPU of one architecture.

    Args:
        arch: such as "gfx942".
    """

    def __init__(self, arch):
        self.arena = Arena()
        self.decoder = Decoder(arch, self.arena)

    def run(self, code, grid, arguments: bytes, num_warps, reverse=False, limit=LIMIT, traced=False):
        """Execute `code`, a `CodeObject`, for every program of `grid`.

        Args:
            grid: numbers of programs along x, y, z.
            arguments: the kernel-argument segment.
            num_warps: waves of a program.
            reverse: run the waves of a program in descending order between barriers.
            limit: instructions of a wave between barriers, above which a loop counts as endless.
            traced: also record `Run.trace` and the banks.

        Raises:
            Fault, Unknown, Endless: see there.
        """
        decoder, self.reverse, self.limit = self.decoder, reverse, limit
        self.result = Run(traced)
        placed = self.arena.place(code.image, 4096, code.start % 4096) - code.start
        padded = np.frombuffer(arguments + bytes(-len(arguments) % 64 + 64), np.uint8)
        kernarg = self.arena.place(padded, 64)
        words = padded.view(np.uint32)
        descriptor = SCRATCH & 0xFFFFFFFF, SCRATCH >> 32, 0xFFFFFFFF, 0  # base, size, and a format that is not read
        user = {"kernarg": lambda i: kernarg >> 32 * i & 0xFFFFFFFF, "junk": lambda i: 0xDEAD0000 + i,
                "preload": lambda i: int(words[i]), "scratch": descriptor.__getitem__}  # fmt: skip
        user = [user[kind](i) for kind, i in code.user_sgprs]
        self.first, self.decoded = placed + code.first, {}
        x, y, z = grid
        programs = np.stack(np.meshgrid(np.arange(z), np.arange(y), np.arange(x), indexing="ij"), -1).reshape(-1, 3)
        for begin in range(0, len(programs), _BATCH):
            batch = programs[begin : begin + _BATCH, ::-1]
            first = traced and not begin
            decoder.lds = Lds(len(batch), max(code.lds, 1), 1, count_banks=first)
            self._batch(code, batch, user, num_warps, first)
            self.result.bank_passes += decoder.lds.passes
            self.result.bank_least += decoder.lds.least
        return self.result

    def _batch(self, code, programs, user, num_warps, traced):
        decoder, lanes, count = self.decoder, self.decoder.lanes, len(programs)
        scratch = [Lds(count * lanes, max(code.scratch, 1), 2) for _ in range(num_warps)]
        junk = np.random.default_rng(7)
        waiting = []
        for number in range(num_warps):
            v = junk.integers(0, 1 << 32, (512 if decoder.cdna else 256, 1, lanes), np.uint32)
            v = np.repeat(v, count, 1)
            s = np.repeat(junk.integers(0, 1 << 32, (SCALARS, 1), np.uint32), count, 1)
            for i, value in enumerate(user):
                s[i] = value
            for i, axis in enumerate(code.program_ids):
                s[len(user) + i] = programs[:, axis]
            if code.scratch_offset:
                s[len(user) + len(code.program_ids)] = 0
            if code.ids_in_ttmp:  # gfx12: the wave's number from bit 25 of ttmp8; x in ttmp9, y and z in ttmp7's halves
                s[108 + 8] = number << 25
                s[108 + 9] = programs[:, 0]
                s[108 + 7] = programs[:, 1] | programs[:, 2] << 16
            s[EXEC] = s[EXEC + 1] = 0xFFFFFFFF
            if not decoder.cdna:
                s[124] = 0
            v[0] = number * lanes + np.arange(lanes)  # x in bits 0 to 9; y and z are 0
            waiting.append([Waves(v, s, np.zeros(count, bool), np.arange(count), self.first)])
        order = range(num_warps - 1, -1, -1) if self.reverse else range(num_warps)
        while any(waiting):
            for number in order:
                decoder.scratch = scratch[number]
                reached = []
                for waves in waiting[number]:
                    trace = self.result.trace if traced and number == 0 and waves.programs[0] == 0 else None
                    self._until_barrier(waves, reached, trace)
                waiting[number] = reached

    def _until_barrier(self, waves, reached, trace):
        """Run waves up to their end, or to a barrier, where they join `reached`."""
        running = [waves]
        decoded, counts = self.decoded, self.result.counts
        while running:
            waves = running.pop()
            programs, steps = len(waves.programs), 0
            while True:
                instruction = decoded.get(waves.pc)
                if instruction is None:
                    instruction = decoded[waves.pc] = self._decode(waves.pc)
                counts[instruction.name] = counts.get(instruction.name, 0) + programs
                if trace is not None and waves.programs[0] == 0:
                    trace.append(instruction)
                steps += 1
                kind = instruction.kind
                if kind == "step":
                    try:
                        instruction.run(waves)
                    except Exception as error:
                        error.add_note(f"{instruction.name} at +{waves.pc - self.first:#x}")
                        raise
                    waves.pc += instruction.size
                    continue
                following = waves.pc + instruction.size
                if kind == "end":
                    break
                if kind == "barrier":
                    waves.pc = following
                    reached.append(waves)
                    break
                if steps > self.limit:
                    raise Endless(f"{steps} instructions of a wave, at +{waves.pc - self.first:#x}")
                taken = instruction.run(waves)
                if taken.all():
                    waves.pc = following + instruction.target
                elif not taken.any():
                    waves.pc = following
                else:
                    other = waves.part(~taken)
                    other.pc = following
                    running.append(other)
                    waves = waves.part(taken)
                    waves.pc = following + instruction.target
                    programs = len(waves.programs)

    def _decode(self, pc):
        instruction = self.decoder.decode(self.arena.read(pc, 20).tobytes())
        self.result.visited[pc - self.first] = instruction
        return instruction

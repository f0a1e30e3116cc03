"""Hold the state of AMD waves: registers, memory and LDS.

Waves of the same number in several programs run as one: a vector register is an array (programs, lanes), a scalar
register (programs,). Where programs branch differently, their waves part.
"""

import numpy as np

VCC, M0, EXEC = 106, 124, 126  # numbers of scalar registers; VCC and EXEC have a second half in wave64
SCALARS = 128
BANKS = 32  # of LDS, 4 bytes wide
SCRATCH = 0x5C7A_0000_0000  # base address in the buffer descriptor of scratch, where nothing else lies
_GUARD = 256  # bytes that no tensor owns, on both sides of each


class Fault(RuntimeError):
    """An access to bytes that the kernel does not own."""


class Arena:
    """The GPU's global memory: every byte that no tensor owns is forbidden."""

    base = 1 << 40

    def __init__(self):
        self.bytes = np.zeros(1 << 20, np.uint8)
        self.owner_end = np.zeros(1 << 20, np.int32)  # for each byte: the end of its tensor, 0 if it has none
        self.writable_end = np.zeros(1 << 20, np.int32)
        self.clear()

    def clear(self):
        self.top = 0
        self.bytes[:] = 0xAB
        self.owner_end[:] = 0
        self.writable_end[:] = 0

    def place(self, data: np.ndarray, alignment: int, phase: int = 0, writable: bool = False) -> int:
        """Copy bytes into memory; return their address, `phase` modulo `alignment`."""
        at = -(-(self.top + _GUARD) // alignment) * alignment + phase
        end = at + len(data)
        while end + _GUARD > len(self.bytes):
            self.bytes = np.concatenate([self.bytes, np.full_like(self.bytes, 0xAB)])
            self.owner_end = np.concatenate([self.owner_end, np.zeros_like(self.owner_end)])
            self.writable_end = np.concatenate([self.writable_end, np.zeros_like(self.writable_end)])
        self.bytes[at:end] = data
        self.owner_end[at:end] = end
        if writable:
            self.writable_end[at:end] = end
        self.top = end
        return self.base + at

    def read(self, address: int, size: int) -> np.ndarray:
        return self.bytes[address - self.base : address - self.base + size]

    def places(self, addresses, size, ends):
        """Return positions in `bytes` of accesses of `size` bytes.

        Raises:
            Fault: an access leaves its tensor.
        """
        at = (addresses - np.uint64(self.base)).astype(np.int64)
        inside = (at >= 0) & (at < len(self.bytes))
        owned = inside & (ends[np.where(inside, at, 0)] >= at + size)
        if not owned.all():
            bad = at[~owned]
            raise Fault(f"{len(bad)} accesses of {size} bytes outside every tensor, the first at {bad[0]:#x}")
        return at

    def load(self, addresses, size):
        """Load `size` bytes from each of a vector of addresses: (addresses, size) uint8."""
        return _gather(self.bytes, self.places(addresses, size, self.owner_end), size)

    def store(self, addresses, data):
        _scatter(self.bytes, self.places(addresses, data.shape[1], self.writable_end), data)


class Lds:
    """The local memory of several programs, junk at first.

    Attributes:
        passes: with `count_banks`: for each access of the first program, the words in its fullest bank.
        least: the same if all banks were equally full.
    """

    def __init__(self, programs, size, seed, count_banks=False):
        self.size, self.count_banks = size, count_banks
        self.passes = self.least = 0
        self.bytes = np.random.default_rng(seed).integers(0, 256, programs * size, np.uint8)

    def places(self, programs, addresses, size):
        addresses = addresses.astype(np.int64)
        if len(addresses) and addresses.max() + size > self.size:
            raise Fault(f"access of {size} bytes at {addresses.max()} of {self.size} bytes of LDS")
        if self.count_banks:
            words = np.unique(addresses[programs == 0][:, None] // 4 + np.arange(-(-size // 4)))
            self.passes += int(np.bincount(words % BANKS, minlength=BANKS).max())
            self.least += -(-len(words) // BANKS)
        return programs * self.size + addresses

    def load(self, programs, addresses, size):
        return _gather(self.bytes, self.places(programs, addresses, size), size)

    def store(self, programs, addresses, data):
        _scatter(self.bytes, self.places(programs, addresses, data.shape[1]), data)


def _word(size, at):
    """Return the widest word that divides `size` and all positions."""
    for word in (4, 2):
        if size % word == 0 and not (at & (word - 1)).any():
            return word
    return 1


def _gather(memory, at, size):
    word = _word(size, at)
    words = memory.view(f"u{word}")[(at // word)[:, None] + np.arange(size // word)]
    return np.ascontiguousarray(words).view(np.uint8)


def _scatter(memory, at, data):
    word = _word(data.shape[1], at)
    places = (at // word)[:, None] + np.arange(data.shape[1] // word)
    memory.view(f"u{word}")[places] = np.ascontiguousarray(data).view(f"u{word}")


class Waves:
    """Waves of one number in several programs that are at the same instruction.

    Attributes:
        v: (registers, programs, lanes) uint32: vector registers; from 256 on, accumulation registers.
        s: (SCALARS, programs) uint32: scalar registers, VCC and EXEC among them.
        scc: (programs,) bool.
        programs: (programs,) int64: the programs' rows in LDS and scratch.
        pc: the address of the next instruction.
    """

    def __init__(self, v, s, scc, programs, pc):
        self.v, self.s, self.scc, self.programs, self.pc = v, s, scc, programs, pc
        self.lanes = v.shape[2]
        self._active = None

    def part(self, chosen) -> "Waves":
        return Waves(self.v[:, chosen], self.s[:, chosen], self.scc[chosen], self.programs[chosen], self.pc)

    @property
    def active(self):
        """Return the lanes that EXEC selects, (programs, lanes) bool."""
        if self._active is None:
            self._active = self.mask(EXEC)
            self.all_active = bool(self._active.all())
        return self._active

    def mask(self, register):
        """Return a scalar register, or a pair, as bools by lane."""
        words = np.ascontiguousarray(self.s[register : register + self.lanes // 32].T)
        return np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").view(bool)

    def set_mask(self, register, bits):
        bits = np.broadcast_to(bits, (len(self.programs), self.lanes))
        words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        for i in range(self.lanes // 32):
            self.set_scalar(register + i, words[:, i])

    def set_scalar(self, register, value):
        self.s[register] = value
        if register >= EXEC:
            self._active = None

    def set_vector(self, register, value, lanes=None):
        """Write a vector register in active lanes, `lanes` of them where given."""
        active = self.active
        if lanes is not None:
            np.copyto(self.v[register], value, where=active & lanes)
        elif self.all_active:
            self.v[register] = value
        else:
            np.copyto(self.v[register], value, where=active)

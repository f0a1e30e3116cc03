"""Run launches of ops on an emulated AMD GPU."""

import ctypes
import functools
import struct
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from liger_hw import backends
from liger_hw.backends.device import Device
from liger_hw.hooks import hooks
from liger_lab.levels import crosscompile
from liger_lab.levels.emulation import code_object
from liger_lab.levels.emulation.execution import LIMIT, Machine, Run

_SCALARS = {"fp32": "<f", "i32": "<i", "i64": "<q", "i1": "<?"}


@dataclass(frozen=True)
class Executed:
    """A launch that ran.

    Attributes:
        launch: the `crosscompile.Launch`.
        grid: programs by axis.
        elements: of the launch's largest tensor.
        run: the `execution.Run`.
    """

    launch: crosscompile.Launch
    grid: tuple
    elements: int
    run: Run

    @property
    def instructions(self) -> int:
        """Return the number of instructions that waves executed."""
        return sum(self.run.counts.values())


@contextmanager
def executed_on(
    device: Device, reverse: bool = False, patch=None, limit: int | None = None, traced: bool = False
):  # fmt: skip
    """Execute launches on CPU tensors as `device` would; yield the list of `Executed`.

    Args:
        device: one of `crosscompile.DEVICES`, of AMD.
        reverse: run the waves of a program in descending order between barriers.
        patch: a function of a launch and its `CodeObject`, which returns the one to execute.
        limit: instructions of a wave between barriers, above which a loop counts as endless; None: `execution.LIMIT`.
        traced: also record what `facts` needs.

    Raises:
        Fault: a kernel left its tensors.
        Unknown: an instruction is not known.
    """
    executed, machine = [], _machine(device.arch)

    def execute(kernel, grid, config, *args):
        if 0 in grid:
            return
        launch = crosscompile.describe(kernel, config, args, device)
        code = code_of(launch)
        if patch:
            code = patch(launch, code)
        values = [*args, *config.meta.values()]
        values = [
            (launch.signature[parameter.name], value)
            for parameter, value in zip(kernel.params, values)
            if launch.signature[parameter.name] != "constexpr"
        ]
        machine.arena.clear()
        placed = _place(machine.arena, values)
        arguments = _arguments(code, values, placed, grid, launch.options["num_warps"] * device.warp_size)
        run = machine.run(code, grid, arguments, launch.options["num_warps"], reverse, limit or LIMIT, traced)
        for pointer, (address, size) in placed.items():
            data = np.ascontiguousarray(machine.arena.read(address, size))
            ctypes.memmove(pointer, data.ctypes.data, size)
        elements = max((value.numel() for value in args if torch.is_tensor(value)), default=0)
        executed.append(Executed(launch, tuple(grid), elements, run))

    with hooks.replace_launches(execute), backends.use_backend(f"{device.vendor}:{device.arch}"):
        yield executed


@functools.cache
def _machine(arch):
    return Machine(arch)


_codes, _resources = {}, {}  # by the launch's key


def code_of(launch):
    """Return the `CodeObject` of a launch, compiled once a process."""
    binary = _codes.get(launch.key)
    if binary is None:
        text, shared = crosscompile.built(launch, binary=True)
        binary = code_object.read(text["hsaco"], text["amdgcn"], launch.arch)
        binary = _codes[launch.key] = code_object.with_lds(binary, shared)
        _resources[launch.key] = crosscompile.read(text, shared)
    return binary


def resources_of(launch) -> crosscompile.Resources:
    """Return the resources of a launch that ran."""
    return _resources[launch.key]


def _place(arena, values):
    """Copy every storage into memory; return pointer -> (address, size).

    Addresses agree with pointers modulo 256.
    """
    placed = {}
    for _, value in values:
        if torch.is_tensor(value):
            storage = value.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
            if size and pointer not in placed:
                data = np.frombuffer(ctypes.string_at(pointer, size), np.uint8)
                placed[pointer] = arena.place(data, 256, pointer % 256, writable=True), size
    return placed


def _arguments(code, values, placed, grid, threads):
    """Return the kernel-argument segment: the launch's values, Triton's two scratch pointers, hidden arguments."""
    segment = bytearray(max((a.offset + a.size for a in code.arguments), default=0))
    remaining = iter(values)
    for argument in code.arguments:
        if argument.kind.startswith("hidden"):
            axis = "xyz".find(argument.kind[-1])
            if argument.kind.startswith("hidden_block_count"):
                struct.pack_into("<I", segment, argument.offset, grid[axis])
            elif argument.kind.startswith("hidden_group_size"):
                struct.pack_into("<H", segment, argument.offset, threads if axis == 0 else 1)
            elif argument.kind == "hidden_grid_dims":
                struct.pack_into("<H", segment, argument.offset, 3)
            continue
        type, value = next(remaining, ("*", 0))
        if torch.is_tensor(value):
            storage = value.untyped_storage().data_ptr()
            address = placed[storage][0] + value.data_ptr() - storage if storage in placed else 0
            struct.pack_into("<Q", segment, argument.offset, address)
        elif type == "*":
            struct.pack_into("<Q", segment, argument.offset, 0)
        else:
            struct.pack_into(_SCALARS[type], segment, argument.offset, value)
    return bytes(segment)

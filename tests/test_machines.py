"""Machines that differ choose differently, each for the reason that it differs."""

import itertools

import pytest

from liger_hw import tuning
from liger_hw.backends import amd, nvidia
from liger_hw.kernels import load_all
from liger_lab.levels.crosscompile import DEVICES

load_all()
CDNA = [arch for arch, device in amd.ARCHS.items() if device.warp_size == 64]
RDNA = [arch for arch, device in amd.ARCHS.items() if device.warp_size == 32]
DATA_CENTRE = [arch for arch, device in nvidia.ARCHS.items() if device.core.shared > 128 * 1024]
CONSUMER = [arch for arch, device in nvidia.ARCHS.items() if device.core.shared <= 128 * 1024]


def chosen(kernel, *shape, arch):
    return tuning.choice.CONFIGS[kernel].heuristic(*shape, DEVICES[arch])


@pytest.mark.parametrize("kernel", ["rms_norm_forward", "layer_norm_forward"])
@pytest.mark.parametrize("cols", [1024, 4096, 8192])
def test_a_wave_of_64_lanes_needs_half_the_warps(kernel, cols):
    """A row in one block keeps its values a lane, and so its 16-byte accesses."""
    for wide, narrow in itertools.product(CDNA, RDNA):
        of_64, of_32 = (chosen(kernel, cols, 2, arch=arch) for arch in (wide, narrow))
        assert of_64.meta == of_32.meta and 2 * of_64.num_warps == of_32.num_warps


def test_no_program_has_more_lanes_than_a_block_may():
    for arch in CDNA:
        assert chosen("rms_norm_forward", 32768, 2, arch=arch).num_warps == 16
    for arch in RDNA:
        assert chosen("rms_norm_forward", 32768, 2, arch=arch).num_warps == 32


def test_loads_ahead_only_where_they_cost_no_registers():
    for arch in (*CDNA, *RDNA):
        few = chosen("rms_norm_backward", 4096, 2, 2, arch=arch)
        assert few["STAGES"] == 1 and few.programs >= 4, "programs hide the latency"
        assert chosen("cross_entropy_forward", 128256, 2, True, True, arch=arch)["STAGES"] == 1
    for arch in (*DATA_CENTRE, *CONSUMER):
        few = chosen("rms_norm_backward", 4096, 2, 2, arch=arch)
        assert few["STAGES"] == 3 and few.programs == 2
        assert chosen("cross_entropy_forward", 128256, 2, True, False, arch=arch)["STAGES"] > 1


def test_99_KiB_hold_less_than_163_or_227():
    """Shared memory limits the loads ahead of rows of 8,192 columns."""
    for itemsize, read, wanted in ((2, 3, (3, 3, 3)), (4, 2, (3, 3, 1)), (4, 3, (1, 3, 1))):
        of = [
            chosen("rms_norm_backward", 8192, itemsize, read, arch=arch)["STAGES"] for arch in ("sm80", "sm90", "sm86")
        ]
        assert tuple(of) == wanted


def test_programs_of_a_norms_backward_are_no_more_than_shared_memory_holds():
    for arch in (*DATA_CENTRE, *CONSUMER):
        for cols in (40, 128, 256, 512, 1024, 2304, 4096, 5120, 8192):
            for itemsize in (2, 4):
                few = chosen("rms_norm_backward", cols, itemsize, 3, arch=arch)
                staged = (few["STAGES"] - 1) * 3 * few["ROWS"] * few["COLS"] * itemsize
                assert few.programs * (staged + 1024 + 128) <= DEVICES[arch].core.shared


def test_two_programs_of_8_warps_on_a_core_of_48_and_99_KiB():
    for arch in CONSUMER:
        few = chosen("cross_entropy_forward", 128256, 2, False, True, arch=arch)
        staged = (few["STAGES"] - 1) * few["COLS"] * 6  # bf16 logits and fp32 class weights
        assert few.num_warps == 8 and 2 * (staged + 1024) <= DEVICES[arch].shared_memory


def test_a_core_of_48_warps_has_no_room_for_a_second_program_of_32():
    for arch in CONSUMER:
        assert chosen("rms_norm_backward", 16384, 2, 2, arch=arch).num_warps <= 16


def test_a_norms_backward_asks_for_the_bytes_that_should_be_under_way():
    for arch in (*DATA_CENTRE, *CONSUMER):
        for cols, itemsize in itertools.product((128, 512, 1001, 1024, 2304, 4096, 5120, 8192), (2, 4)):
            few = chosen("rms_norm_backward", cols, itemsize, 2, arch=arch)
            ahead = (few["STAGES"] - 1) * 2 * few["ROWS"] * few["COLS"] * itemsize
            assert few["STAGES"] == 1 or few.programs * ahead >= DEVICES[arch].bytes_in_flight


def test_a_looped_row_leaves_room_for_a_second_program_on_amd():
    for arch in (*CDNA, *RDNA):
        lanes = chosen("rms_norm_forward", 65536, 2, arch=arch).num_warps * DEVICES[arch].warp_size
        assert lanes <= DEVICES[arch].max_threads // 2

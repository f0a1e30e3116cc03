"""Launch configurations that several kernel files share."""

import functools

from liger_hw.tuning import Config, power_of_2, row_warps


def widest_block(device, rows_live):
    """Return the widest one-block row of which `rows_live` fp32 copies fit the registers."""
    values = min(32, device.registers // (2 * rows_live))
    return device.max_threads * power_of_2(values + 1) // 2


def row_block(cols, device, rows_live):
    """Return a block for a whole row, else half of the widest, for a loop."""
    widest = widest_block(device, rows_live)
    return power_of_2(cols) if cols <= widest else widest // 2


def two_on_a_core(block, device):
    """Return the least values a lane with which two programs share a core."""
    return power_of_2(2 * block // device.core_threads)


def norm_forward_config(cols, device, rows_live=1):
    """Return the configuration (ROWS, COLS) of a kernel that reduces a row and writes another.

    `rows_live` fp32 copies of a row in one block fit the registers.
    """
    # A row in one block has 32 values a lane, and short rows share a program: on an H200 within 1% of any other choice
    # from 1,024 to 16,384 columns. A row read in a loop has 8 values a lane, in half of the block where registers hold
    # the loads ahead: on an H200 65,536 columns take 0.166 ms on 32 warps and 0.199 on 16.
    block, per_lane = row_block(cols, device, rows_live), 32
    if cols > block:
        block = (8 if device.async_copy else 4) * device.max_threads
        per_lane = max(8, two_on_a_core(block, device))
    rows = max(1, min(16, 4096 // block))
    return Config({"ROWS": rows, "COLS": block}, row_warps(rows * block, device, per_lane))


def norm_backward_config(cols, itemsize, device, read=2):
    """Return the configuration of a norm's backward, whose programs stride over rows.

    A program reads two or three tensors, writes one and sums over rows. The meta-parameters are ROWS, COLS and the
    STAGES of its loop over rows. A row wider than COLS takes several blocks.
    """
    widest, block = widest_block(device, 4), power_of_2(cols)
    if cols > widest:  # RMSNorm of 16,384 columns on an H200: 87% of the copy rate with 32 values a lane, 68% with 64
        return Config({"ROWS": 1, "COLS": widest // 2, "STAGES": 1}, row_warps(block, device, 32))
    staged = _staged_rows_config(cols, block, itemsize, device, read) if device.async_copy else None
    if staged:
        return staged
    # Loads through registers: 16 values a lane, short rows share a program, and many programs hide the latency. Not
    # measured on a GPU without asynchronous copies; nothing spills (compiled).
    rows = max(1, min(32, 2048 // block))
    warps = row_warps(rows * block, device, max(16, two_on_a_core(rows * block, device)))
    return Config({"ROWS": rows, "COLS": block, "STAGES": 1}, warps, programs=max(1, 16384 // (rows * block)))


def _staged_rows_config(cols, block, itemsize, device, read):
    """Return the configuration that loads rows ahead; None if three stages do not fit."""
    # Four warps take 64 bytes of short rows a lane, and half of that where more than 16 rows would share them (they
    # spill) or a row fills 8 or 16 KiB. Three stages are in flight (RMSNorm of 8,192 columns on an H200: 94% of the
    # copy rate, 72% with 2), four where a quarter of a long row's block is empty (6 to 21% faster), each of 16 KiB of a
    # tensor a core: at least 64 KiB in all; a B200 needs 43.
    row = block * itemsize
    long = 8192 <= row <= 16384
    sparse = long and 4 * cols <= 3 * block
    lane = 32 if 8192 // row > 16 or (long and not sparse) else 64
    tile = block * max(1, min(32, 128 * lane // row))
    # shared memory holds all stages but one, 1 KiB of the driver's, sums, and an fp32 tile for rows of broken vectors
    step, reserved = read * tile * itemsize, 1280 + (4 * tile if cols % 8 else 0)
    stages = min(4 if sparse else 3, 1 + (device.shared_memory - reserved) // step)
    if stages < 3:
        return None
    programs = min(max(1, 16384 // (tile * itemsize)), device.shared_memory // ((stages - 1) * step + reserved))
    warps = row_warps(tile, device, max(lane // itemsize, two_on_a_core(tile, device)))
    return Config({"ROWS": tile // block, "COLS": block, "STAGES": stages}, warps, programs=programs)


def norm_wide_sums_config(device, per_lane):
    """Return the configuration (COLS, STAGES) of a kernel that reduces one row of two tensors."""
    block = device.max_threads * 8
    return Config({"COLS": block, "STAGES": 1}, row_warps(block, device, per_lane))


@functools.cache
def in_registers(cols, itemsize, device):
    """Tell whether a program of a norm's backward holds two rows in registers.

    Several blocks need 16 bits and whole vectors: 16,383 columns spill (compiled for an A100 to an RTX 50).
    """
    widest = widest_block(device, 4)
    return cols <= widest or (cols <= 2 * widest and itemsize == 2 and cols % 8 == 0)

"""Count what the execution of a launch shows about its machine code."""

import math
import re
from collections import Counter

from liger_lab.levels.crosscompile import DEVICES
from liger_lab.levels.emulation.accesses import access_of
from liger_lab.levels.emulation.launches import resources_of
from liger_lab.levels.occupancy import occupancy

_GLOBAL = re.compile(r"(?:GLOBAL|BUFFER|FLAT)_(?:LOAD|STORE)_")
_LDS = re.compile(r"DS_(?:READ|WRITE|LOAD|STORE)")


def facts_of(executed) -> dict:
    """Return the facts of an `Executed` that was traced.

    Returns:
        "per element": instructions of lanes for an element of the launch's largest tensor;
        "widths": bytes a lane -> share of the loads and stores of global memory;
        "lds": bytes that lanes read and write in LDS, for an element;
        "banks": the words in the fullest bank of LDS against an equal share, 1 without a conflict; None without LDS;
        "wait": the mean number of instructions between a load and the wait for it; None without loads;
        "registers": a lane's vector registers; "occupancy": the share of the core's warps that fit.
    """
    launch, run = executed.launch, executed.run
    device, resources = DEVICES[launch.arch], resources_of(launch)
    warps, lanes = launch.options["num_warps"], device.warp_size
    widths, lds = Counter(), 0
    for name, count in run.counts.items():
        if _GLOBAL.match(name):
            widths[access_of(name)[1]] += count
        elif _LDS.match(name):
            accesses = 2 if re.search("READ2|WRITE2|2ADDR", name) else 1
            lds += accesses * count * access_of(re.sub(r"(READ|WRITE)2(ST64)?", r"\1", name))[1]
    distances = wait_distances(run.trace, stores_count=launch.arch.startswith("gfx9"))
    share = occupancy(device.core, resources.registers, resources.shared, warps).share
    return {
        "kernel": launch.kernel, "warps": warps, "programs": math.prod(executed.grid), "elements": executed.elements,
        "per element": round(executed.instructions * lanes / executed.elements, 1),
        "widths": {width: round(count / widths.total(), 2) for width, count in sorted(widths.items(), reverse=True)},
        "lds": round(lds * lanes / executed.elements, 2),
        "banks": round(run.bank_passes / run.bank_least, 2) if run.bank_least else None,
        "wait": round(sum(distances) / len(distances)) if distances else None,
        "registers": resources.registers, "occupancy": round(share, 2),
    }  # fmt: skip


def wait_distances(trace: list, stores_count: bool) -> list[int]:
    """Return, for each wait that ends loads, the instructions since the last of them.

    Args:
        trace: `Instruction`s of a wave, in order.
        stores_count: the counter of loads also counts stores (gfx9).
    """
    under_way, distances = [], []  # (step, whether it is a load) of accesses, oldest first
    for step, instruction in enumerate(trace):
        if _GLOBAL.match(instruction.name):
            load = "LOAD" in instruction.name
            if load or stores_count:
                under_way.append((step, load))
        elif instruction.wait is not None and len(under_way) > instruction.wait:
            ended = under_way[: len(under_way) - instruction.wait]
            under_way = under_way[len(ended) :]
            loads = [at for at, load in ended if load]
            if loads:
                distances.append(step - loads[-1])
    return distances

"""Search for configurations whose compiled code is better than a heuristic's choice.

`run` is `liger-hw neighbours`. It needs no GPU. The rating of a configuration reads its compiled code:

    clean      the code passes every gate: fits, spills nothing, ...
    width      bytes a lane of the narrowest wide access / bytes a lane that its tile allows
    under way  bytes that a core's resident programs have requested from memory / `Device.bytes_in_flight`
    waves      warps that a scheduler can choose from / WAVES
    overlap    programs on a core / 2: one loads while another reduces. One is enough if its loop has three or more
               stages, if it reads a row twice, the second time from a cache that two programs would share, or if it
               alone requests twice the bytes that should be under way
    reads      number of loads of a whole tile: a kernel that loops over a row twice reads it twice

All but reads are shares of the sufficient amount, limited to 1. All launches of one key share one choice. Another
configuration dominates it if it is as good in everything at all of these launches, and clearly better in one share at
one launch. The search covers heuristic choices with a share below 1 only (measured winners stay). It tries the tuner's
space: `tuning.search.neighbours`.
"""

import importlib
import inspect
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from liger_hw import console, tuning
from liger_hw.tuning import Config
from liger_lab import terminal
from liger_lab.levels import compiled
from liger_lab.levels.compiled import Use
from liger_lab.levels.crosscompile import DEVICES, Launch, Resources
from liger_lab.levels.occupancy import occupancy

# Warps that a scheduler needs to hide latency: with two, RMSNorm's backward moves 94% of an H200's copy rate.
WAVES = 2
# Overlap on an H200, bf16: RMSNorm's forward at 16,384 columns is 46% faster with two programs on a core than with one;
# in fp32, twice the bytes, 1% at most. At 65,536 columns, read twice, one is faster: 0.165 ms against 0.199 with two.
# Two stages are slower than one in every norm's backward (16,384 columns: 0.246 ms against 0.228); three and more are
# faster.
AHEAD = 3
CLEARLY = 1.1  # factor; the bytes that should be under way are an estimate, so smaller gains do not count


@dataclass(frozen=True)
class Rating:
    """Rating of a configuration; the module describes the shares, each from 0 to 1."""

    clean: float
    width: float
    under_way: float
    waves: float
    overlap: float
    reads: int

    @property
    def shares(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "reads"}

    @property
    def perfect(self) -> bool:
        return all(share == 1 for share in self.shares.values())

    def as_good_as(self, other: "Rating") -> bool:
        """Tell whether this rating is at least as good in everything."""
        return self.reads <= other.reads and all(mine >= its for mine, its in self._beside(other))

    def beats(self, other: "Rating") -> bool:
        """Tell whether this rating is clearly better in one share."""
        return any(mine > its * CLEARLY for mine, its in self._beside(other))

    def _beside(self, other):
        return zip(self.shares.values(), other.shares.values(), strict=True)

    def __str__(self):
        said = [f"{name.replace('_', ' ')} {share:.2f}" for name, share in self.shares.items() if share < 1]
        return ", ".join(said) or "enough of all"


NOTHING = Rating(0.0, 0.0, 0.0, 0.0, 0.0, 10**9)


def dominates(these: list[Rating], those: list[Rating]) -> bool:
    """Tell whether `these` are as good as `those` at every launch and clearly better once."""
    pairs = list(zip(these, those, strict=True))
    return all(this.as_good_as(that) for this, that in pairs) and any(this.beats(that) for this, that in pairs)


def rate(launch: Launch, result: Resources | str) -> Rating:
    """Rate a compiled launch."""
    if compiled.judge(launch, result).keys() - {"widths"}:
        return NOTHING
    device = DEVICES[launch.arch]
    core = device.core
    full = occupancy(core, result.registers, result.shared, launch.options["num_warps"])
    widths = [width / required for _, width, required in compiled.widths(launch, result)]
    programs = full.programs
    if _strides(launch):  # a fixed number of programs strides over the rows
        programs = min(programs, launch.config["programs"] * core.compute_units)
    warps = programs * launch.options["num_warps"]
    requested = programs * _loaded(result) * _ahead(launch, device)
    needed = device.bytes_in_flight * core.compute_units
    under_way = min(1.0, requested / max(needed, 1))
    waves = min(1.0, warps / core.schedulers / WAVES)
    tiles = _tiles(result)
    ahead = device.async_copy and launch.config["meta"].get("STAGES", 1) >= AHEAD
    times = Counter()
    for tile in tiles:
        times[tile.pointer] += max(tile.loops, 1)
    twice = compiled.loops_over_row(launch) and max(times.values(), default=0) > 1
    plenty = _loaded(result) >= 2 * needed > 0
    overlap = 1.0 if ahead or twice or plenty else min(1.0, programs / 2)
    return Rating(1.0, min(1.0, *widths, 1.0), under_way, waves, overlap, times.total())


def _strides(launch: Launch) -> bool:
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    return "num_programs" in inspect.getsource(kernel.fn)


def _tiles(resources: Resources) -> list:
    """Return the loads of the kernel's largest tiles."""
    largest = max(access.elements for access in resources.accesses)
    return [access for access in resources.accesses if access.kind == "load" and access.elements == largest]


def _loaded(resources: Resources) -> int:
    """Sum the bytes that one pass over a tile loads."""
    tiles = {}
    for access in _tiles(resources):
        tiles[access.pointer] = max(tiles.get(access.pointer, 0), access.elements * access.itemsize)
    return sum(tiles.values())


def _ahead(launch: Launch, device) -> int:
    """Return the number of tiles that a program requests at a time."""
    return max(launch.config["meta"].get("STAGES", 1) - 1, 1) if device.async_copy else 1


def candidates(launch: Launch) -> dict[str, Launch]:
    """Return the launch with each neighbouring configuration that changes code or grid, by name."""
    names = ("meta", "num_warps", "num_stages", "programs")
    config = Config(**{name: launch.config[name] for name in names}, device=DEVICES[launch.arch])
    by_name = {}
    for near in tuning.search.neighbours(config):
        # a knob is an option of one compiler that only the tuner can measure; num_stages changes none of these kernels
        if not near.knobs and near.num_stages == config.num_stages and may_take(launch, near):
            by_name[str((near.meta, near.num_warps, near.programs))] = launch_with(launch, near)
    return by_name


def launch_with(launch: Launch, config: Config) -> Launch:
    """Return the launch with another configuration of its kernel."""
    return replace(
        launch,
        constants=launch.constants | config.meta,
        options=launch.options | {"num_warps": config.num_warps, "num_stages": config.num_stages},
        config=config.to_json() | {"source": config.source, "key": launch.config["key"]},
    )


def may_take(launch: Launch, config: Config) -> bool:
    """Tell whether the search around a launch includes a configuration.

    A row in one block stays in one block, and a loop stays a loop, as the other form may be another kernel. At least
    half of a block has columns of the row.
    """
    cols = launch.constants.get("cols", math.inf)
    same_path = compiled.loops_over_row(launch_with(launch, config)) == compiled.loops_over_row(launch)
    return same_path and config.meta.get("COLS", 0) < 2 * cols


def _choices(uses: Iterable[Use]) -> list[list[Use]]:
    """Group the uses by the heuristic's choice that they share."""
    by_key = {}
    for use in uses:
        config = use.launch.config
        if config["source"] == tuning.HEURISTIC:
            by_key.setdefault((use.launch.arch, use.launch.kernel, config["key"]), []).append(use)
    return list(by_key.values())


def dominated(uses: Iterable[Use], results: dict) -> list[dict]:
    """Return the imperfect choices, each with the best dominating neighbour, or None.

    Args:
        uses: from `compiled.uses`.
        results: key -> result, of their launches and of these launches' `candidates`.
    """
    lines = []
    for choice in _choices(uses):
        ratings = [rate(use.launch, results[use.launch.key]) for use in choice]
        if all(rating.perfect for rating in ratings):
            continue
        best, best_ratings = None, ratings
        near = [candidates(use.launch) for use in choice]
        for name in near[0]:
            if all(name in launch_by_name for launch_by_name in near):
                its = [rate(launch_by_name[name], results[launch_by_name[name].key]) for launch_by_name in near]
                if dominates(its, best_ratings):
                    best, best_ratings = near[0][name], its
        better = [mine.beats(its) for mine, its in zip(best_ratings, ratings, strict=True)]
        shown = better.index(True) if best else [rating.perfect for rating in ratings].index(False)
        use = choice[shown]
        lines.append({
            "op": use.op, "kernel": use.launch.kernel, "arch": use.launch.arch, "dtype": use.dtype,
            "key": use.launch.config["key"], "shape": use.shapes[0], "config": use.launch.config,
            "rating": vars(ratings[shown]), "better": best and best.config,
            "better_rating": best and vars(best_ratings[shown]),
        })  # fmt: skip
    return lines


def run(archs: list[str], ops: list[str], jobs: int | None, report: Path) -> int:
    """Run `liger-hw neighbours`: rate the choices at wide and real shapes.
    Search around the imperfect ones, print the dominated ones, and write neighbours.json.

    Args:
        archs, ops, jobs, report: as in `compiled.run`.

    Returns:
        0 if no choice is dominated, else 1.

    Raises:
        ValueError: as in `compiled.run`.
    """

    def near(uses, results):
        short = (
            choice
            for choice in _choices(uses)
            if not all(rate(use.launch, results[use.launch.key]).perfect for use in choice)
        )
        return [launch for choice in short for use in choice for launch in candidates(use.launch).values()]

    uses, results = compiled.gather(archs, ops, jobs, origins=[compiled.MODEL, compiled.WIDE], further=near)
    lines = dominated(uses, results)
    report.mkdir(parents=True, exist_ok=True)
    (report / "neighbours.json").write_text(json.dumps(lines, indent=1) + "\n")
    better = [line for line in lines if line["better"]]
    choices = len(_choices(uses))
    print(
        f"{report / 'neighbours.json'}: {choices} choices, {len(lines)} short of something, {len(better)} dominated\n"
    )
    header = ["architecture", "kernel", "shape", "chosen", "short of", "better", "short of"]
    print(console.table(header, [_line(line) for line in better]))
    return 1 if better else 0


def _line(line: dict) -> list[str]:
    def said(config):
        return f"{terminal.parameters(config['meta'])}, {config['num_warps']} warps, {config['programs']} programs"

    config, better = line["config"], line["better"]
    return [line["arch"], line["kernel"], line["shape"], said(config), str(Rating(**line["rating"])), said(better),
            str(Rating(**line["better_rating"]))]  # fmt: skip

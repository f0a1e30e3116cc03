"""Whether something beside a heuristic's choice is better in every way that can be seen without the hardware.

`run` is `liger-hw matrix --search`. A configuration is rated by what its compiled code shows:

    clean      it passes every gate: fits, spills nothing, ...
    width      bytes a lane of its narrowest wide access, of those its tile allows
    under way  bytes that a core's resident programs have asked memory for, of `Device.bytes_in_flight`
    waves      warps that a scheduler has to choose from, of WAVES
    overlap    programs on a core, of two: one loads while another reduces. One is enough if its loop has three stages
               and more, if it walks a row twice, the second time from a cache that two would share, or if it asks by
               itself for twice the bytes that should be under way
    reads      times that a whole tile is loaded: a row that is walked twice is read twice

All but reads are shares of enough, 1 at most: more than enough is no better. A choice is one for all launches of its
key, and another dominates it if at all of them it is as good in everything, and at one clearly better in one of those
shares. Only a heuristic's choice that is short of something is searched around (winners were measured), in the space
that the tuner searches: the neighbours of `tuning.neighbours`.
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
from liger_hw.proof import compiled
from liger_hw.proof.compiled import Use
from liger_hw.proof.crosscompile import DEVICES, Launch, Resources
from liger_hw.tuning import Config

# Warps among which a scheduler finds one that can go on: with two RMSNorm's backward moves 94% of an H200's copy rate.
WAVES = 2
# Overlap, of bf16 on an H200: 16,384 columns of RMSNorm's forward are 46% faster with two programs on a core than with
# one, of fp32, twice the bytes, 1% at most; 65,536, which are read twice, are faster with one: 0.165 ms against 0.199.
# Two stages are slower than one in every norm's backward (16,384 columns: 0.246 ms against 0.228), three and more
# faster.
AHEAD = 3
CLEARLY = 1.1  # bytes that should be under way are a planning number


@dataclass(frozen=True)
class Rating:
    """How good a configuration is, each from 0 to 1; see the module."""

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
        """In everything."""
        return self.reads <= other.reads and all(mine >= its for mine, its in self._beside(other))

    def beats(self, other: "Rating") -> bool:
        """Clearly better in something."""
        return any(mine > its * CLEARLY for mine, its in self._beside(other))

    def _beside(self, other):
        return zip(self.shares.values(), other.shares.values(), strict=True)

    def __str__(self):
        said = [f"{name.replace('_', ' ')} {share:.2f}" for name, share in self.shares.items() if share < 1]
        return ", ".join(said) or "enough of all"


NOTHING = Rating(0.0, 0.0, 0.0, 0.0, 0.0, 10**9)


def dominates(these: list[Rating], those: list[Rating]) -> bool:
    """Whether one configuration is as good as another at every launch, and clearly better at one."""
    pairs = list(zip(these, those, strict=True))
    return all(this.as_good_as(that) for this, that in pairs) and any(this.beats(that) for this, that in pairs)


def rate(launch: Launch, found: Resources | str) -> Rating:
    """The rating of a compiled launch."""
    if compiled.judge(launch, found).keys() - {"widths"}:
        return NOTHING
    device = DEVICES[launch.arch]
    core = device.core
    full = core.occupancy(found.registers, found.shared, launch.options["num_warps"])
    widths = [width / wanted for _, width, wanted in compiled.widths(launch, found)]
    programs = full.programs
    if _strides(launch):  # over the rows, with a fixed number of programs
        programs = min(programs, launch.config["programs"] * core.compute_units)
    warps = programs * launch.options["num_warps"]
    asked = programs * _loaded(found) * _ahead(launch, device)
    needed = device.bytes_in_flight * core.compute_units
    waves = warps / core.schedulers  # among which one scheduler has to choose
    tiles = _tiles(found)
    ahead = device.async_copy and launch.config["meta"].get("STAGES", 1) >= AHEAD
    times = Counter()
    for tile in tiles:
        times[tile.pointer] += max(tile.loops, 1)
    twice = compiled.walks(launch) and max(times.values()) > 1
    plenty = _loaded(found) >= 2 * needed > 0
    overlap = 1.0 if ahead or twice or plenty else min(1.0, programs / 2)
    return Rating(
        1.0, min(1.0, *widths, 1.0), min(1.0, asked / max(needed, 1)), min(1.0, waves / WAVES), overlap, times.total()
    )


def _strides(launch: Launch) -> bool:
    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    return "num_programs" in inspect.getsource(kernel.fn)


def _tiles(found: Resources) -> list:
    """The loads of the kernel's largest tiles."""
    largest = max(access.elements for access in found.accesses)
    return [access for access in found.accesses if access.kind == "load" and access.elements == largest]


def _loaded(found: Resources) -> int:
    """Bytes that one pass over a tile loads."""
    tiles = {}
    for access in _tiles(found):
        tiles[access.pointer] = max(tiles.get(access.pointer, 0), access.elements * access.itemsize)
    return sum(tiles.values())


def _ahead(launch: Launch, device) -> int:
    """Tiles that a program has asked for at a time."""
    return max(launch.config["meta"].get("STAGES", 1) - 1, 1) if device.async_copy else 1


def candidates(launch: Launch) -> dict[str, Launch]:
    """The launch with each neighbour of its configuration that changes code or grid, by what it changes."""
    names = ("meta", "num_warps", "num_stages", "programs")
    config = Config(**{name: launch.config[name] for name in names}, device=DEVICES[launch.arch])
    found = {}
    for near in tuning.neighbours(config):
        # a knob is an option of one compiler, the tuner's to measure; num_stages changes none of these kernels
        if not near.knobs and near.num_stages == config.num_stages and may_take(launch, near):
            found[str((near.meta, near.num_warps, near.programs))] = launch_with(launch, near)
    return found


def launch_with(launch: Launch, config: Config) -> Launch:
    """The launch with another configuration of its kernel."""
    return replace(
        launch,
        constants=launch.constants | config.meta,
        options=launch.options | {"num_warps": config.num_warps, "num_stages": config.num_stages},
        config=config.to_json() | {"source": config.source, "key": launch.config["key"]},
    )


def may_take(launch: Launch, config: Config) -> bool:
    """Whether a configuration is in the space that is searched around a launch.

    A row that is one block stays one, and one that is walked is: the other may be another kernel's. No block is so wide
    that half of it is empty.
    """
    cols = launch.constants.get("cols", math.inf)
    same_path = compiled.walks(launch_with(launch, config)) == compiled.walks(launch)
    return same_path and config.meta.get("COLS", 0) < 2 * cols


def _choices(uses: Iterable[Use]) -> list[list[Use]]:
    """The uses of each heuristic's choice together."""
    found = {}
    for use in uses:
        config = use.launch.config
        if config["source"] == tuning.HEURISTIC:
            found.setdefault((use.launch.arch, use.launch.kernel, config["key"]), []).append(use)
    return list(found.values())


def dominated(uses: Iterable[Use], results: dict) -> list[dict]:
    """The choices that are short of something, each with the best neighbour that dominates it, or None.

    Args:
        uses: of `compiled.uses`.
        results: key -> result, of their launches and of their `candidates`.
    """
    lines = []
    for choice in _choices(uses):
        ratings = [rate(use.launch, results[use.launch.key]) for use in choice]
        if all(rating.perfect for rating in ratings):
            continue
        best, best_ratings = None, ratings
        near = [candidates(use.launch) for use in choice]
        for name in near[0]:
            if all(name in of_use for of_use in near):
                its = [rate(of_use[name], results[of_use[name].key]) for of_use in near]
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
    """`liger-hw matrix --search`: rate every choice at wide and real shapes, search around those that are short
    of something, print what is dominated, and write search.json.

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
    (report / "search.json").write_text(json.dumps(lines, indent=1) + "\n")
    better = [line for line in lines if line["better"]]
    choices = len(_choices(uses))
    print(f"{report / 'search.json'}: {choices} choices, {len(lines)} short of something, {len(better)} dominated\n")
    header = ["architecture", "kernel", "shape", "chosen", "short of", "better", "short of"]
    print(console.table(header, [_line(line) for line in better]))
    return 1 if better else 0


def _line(line: dict) -> list[str]:
    def said(config):
        return f"{console.parameters(config['meta'])}, {config['num_warps']} warps, {config['programs']} programs"

    config, better = line["config"], line["better"]
    return [line["arch"], line["kernel"], line["shape"], said(config), str(Rating(**line["rating"])), said(better),
            str(Rating(**line["better_rating"]))]  # fmt: skip

"""Replace each choice that misses a gate by the nearest configuration that passes.

`run` is `liger-hw compile --mend`. A heuristic does not know the compiler's exceptions: spills at one width,
narrow accesses on one architecture, too much shared memory. Each becomes an entry of origin "compiled" in the shipped
tables, for a class of widths: the compile matrix has samples, users have all widths.

Tables serve several versions of Triton: an entry that another version needed stays while it passes under this one too.
So run every version in turn, until none changes a table.

The entry is the configuration fewest steps (`search.neighbours`) away from the heuristic that passes every gate at
every launch of the class; among equally near ones the best by `ratings`. Compiled entries that the heuristic no longer
needs with the version that wrote them are removed, and measured entries that miss a gate with this version.
"""

from pathlib import Path

from liger_hw import tuning
from liger_hw._triton import triton
from liger_hw.tuning import Config
from liger_lab import contribution, terminal
from liger_lab.levels import compile_cache, compiled, ratings
from liger_lab.levels.compiled import Use
from liger_lab.levels.crosscompile import DEVICES, Launch

STEPS = 2  # away from the heuristic at most


def run(archs: list[str], ops: list[str], jobs: int | None, report: Path) -> int:
    """Mend the shipped tables, then compile and judge as `compiled.run` does.

    Args:
        archs, ops, jobs, report: as in `compiled.run`.

    Returns:
        As `compiled.run`: 1 if a choice misses a gate and nothing within STEPS passes.

    Raises:
        ValueError: as in `compiled.run`.
    """
    uses, results = compiled.gather(archs, ops, jobs)
    cache = compile_cache.Cache()
    with compile_cache.processes(jobs) as pool, terminal.progress() as progress:

        def compile_all(launches):
            return compile_cache.compile_all(launches, pool, cache, progress)

        for arch in dict.fromkeys(use.launch.arch for use in uses):
            arch_uses = [use for use in uses if use.launch.arch == arch]
            table = tuning.entries.read_table(tuning.entries.shipped_file(DEVICES[arch]))
            changes = mended(arch_uses, results, table, compile_all)
            _write(arch, changes)
    return compiled.run(archs, ops, jobs, report)


def mended(uses: list[Use], results: dict, table: dict, compile_all) -> dict:
    """Find what must change in the table of an architecture.

    Args:
        uses: of `compiled.uses`, all of one architecture.
        results: key -> result, of their launches.
        table: what is shipped for it.
        compile_all: launches -> results.

    Returns:
        Key -> entry, or None for an entry to take out.
    """
    changes, classes = {}, {}
    for use in uses:
        key, config = use.launch.config["key"], tuning.choice.CONFIGS[use.launch.kernel]
        if table.get(key, {}).get("origin") == tuning.MEASURED and use.launch.config["source"] == tuning.SHIPPED:
            if not compiled.judge(use.launch, results[use.launch.key]):
                continue
            changes[key] = None
        classes.setdefault(config.class_key(*contribution.numbers_of(key)), []).append(use)
    for class_key, class_uses in classes.items():
        missed = any(compiled.judge(use.launch, results[use.launch.key]) for use in class_uses)
        before = table.get(class_key, {})
        mended_before = before.get("origin") == tuning.COMPILED
        serves = mended_before and any(use.launch.config["source"] == tuning.SHIPPED for use in class_uses)
        other_triton = serves and before.get("triton") != triton.__version__
        if missed or mended_before and not other_triton:
            entry = _entry(class_uses, compile_all, before if other_triton else None)
            if entry or mended_before:
                changes[class_key] = entry
    return changes


def _entry(uses: list[Use], compile_all, before: dict | None = None) -> dict | None:
    """Return the entry of a class of widths.

    None if the heuristic passes at every launch of it, or if nothing near does.

    Args:
        before: the entry that another Triton needs, or None. Where the heuristic passes here, the new one keeps what it
            missed there.
    """
    config = tuning.choice.CONFIGS[uses[0].launch.kernel]
    defaults = [_heuristic(use.launch) for use in uses]
    launches = [ratings.launch_with(use.launch, default) for use, default in zip(uses, defaults)]
    results = compile_all(launches)
    missed = [compiled.judge(launch, results[launch.key]) for launch in launches]
    if not any(missed) and not before:
        return None
    first = next((i for i, gates in enumerate(missed) if gates), 0)
    known, ring = {str(defaults[first].to_json())}, [defaults[first]]
    for _ in range(STEPS):
        near = {str(c.to_json()): c for start in ring for c in tuning.search.neighbours(start)}
        # Vary only meta and num_warps: `programs` changes no code. `num_stages` changes the code of none of these
        # kernels. Only a measurement can choose knobs.
        ring = [c for name, c in near.items() if name not in known and _unvaried(c) == _unvaried(defaults[first])]
        known |= near.keys()
        best = _best(ring, launches, compile_all)
        if best:
            if not any(missed):
                kept = {name: before[name] for name in ("triton", "heuristic_missed")}
                return tuning.search.entry_for(config, best, tuning.COMPILED) | kept
            gate, message = next(iter(missed[first].items()))
            why = f"{gate}: {message} ({uses[first].dtype}, {uses[first].shapes[0]})"
            return tuning.search.entry_for(config, best, tuning.COMPILED, heuristic_missed=why[:300])
    print(f"{launches[first].arch}: {launches[first].config['key']}: nothing within {STEPS} steps passes")
    return None


def _best(candidates: list[Config], launches: list[Launch], compile_all) -> Config | None:
    """Return the best-rated candidate that passes every gate at all launches, or None."""
    candidates = [c for c in candidates if all(ratings.may_take(launch, c) for launch in launches)]
    tried = [[ratings.launch_with(launch, candidate) for launch in launches] for candidate in candidates]
    results = compile_all(launch for candidate_launches in tried for launch in candidate_launches)
    rated = [
        ([ratings.rate(launch, results[launch.key]) for launch in candidate_launches], candidate)
        for candidate, candidate_launches in zip(candidates, tried)
        if not any(compiled.judge(launch, results[launch.key]) for launch in candidate_launches)
    ]
    if not rated:
        return None
    # a further read of a whole tile counts as much as the loss of a whole share
    return max(rated, key=lambda pair: sum(sum(rating.shares.values()) - rating.reads for rating in pair[0]))[1]


def _unvaried(config: Config) -> tuple:
    return config.programs, config.num_stages, config.knobs


def _heuristic(launch: Launch) -> Config:
    numbers = contribution.numbers_of(launch.config["key"])
    return tuning.choice.CONFIGS[launch.kernel].heuristic(*numbers, DEVICES[launch.arch])


def _write(arch: str, changes: dict) -> None:
    file = tuning.entries.shipped_file(DEVICES[arch])
    table = tuning.entries.read_table(file) | changes
    table = {key: entry for key, entry in table.items() if entry}
    if changes:
        tuning.entries.write_table(file, table) if table else file.unlink()
    for key, entry in sorted(changes.items()):
        print(f"{file.name}: {key}: {entry['heuristic_missed'] if entry else 'taken out'}")

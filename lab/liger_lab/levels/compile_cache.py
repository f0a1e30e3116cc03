"""Compile launches in several processes and keep each result in the user's cache."""

import gc
import itertools
import json
import os
from collections.abc import Iterable
from concurrent.futures import as_completed
from pathlib import Path

import torch

from liger_hw import tuning
from liger_lab.levels import crosscompile
from liger_lab.levels.crosscompile import DEVICES, Launch, Resources
from liger_lab.levels.workers import Died, Workers

LARGEST_FILE = 2**28  # bytes: every launch for every architecture takes 20 MB, and again for each changed source


class Cache:
    """Keep results by `Launch.key` in a file, one to a line.

    A result is on disk as soon as it exists, so an interrupted process loses none.
    """

    def __init__(self, folder: Path | None = None):
        folder = folder or tuning.entries.cache_folder()
        triton, reader = crosscompile.reader()
        self.file = folder / f"compiled-{triton}-{reader[:8]}.jsonl"
        self.known = {}
        for stale in folder.glob(f"compiled-{triton}-*.jsonl"):
            if stale != self.file:
                stale.unlink(missing_ok=True)
        try:
            lines = tuning.entries.read_owned(self.file, LARGEST_FILE).splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            tuning.entries.warn_once(f"results of compilation in {self.file} are not used: {error}")
            return
        for line in lines:
            try:
                key, result = json.loads(line)
                self.known[key] = result if isinstance(result, str) else Resources.from_json(result)
            except (TypeError, ValueError):  # a killed process may leave an incomplete line
                continue

    def add(self, key: str, result: Resources | str) -> None:
        self.known[key] = result
        line = json.dumps([key, result if isinstance(result, str) else result.to_json()]) + "\n"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.file, "ab", buffering=0) as out:
                out.write(line.encode())
        except OSError as error:
            tuning.entries.warn_once(f"results of compilation are not kept in {self.file}: {error}")

    def keep(self, keys: set) -> None:
        """Drop all other results if they are at least half of the file."""
        if len(self.known) < 2 * len(keys):
            return
        part = self.file.with_suffix(f".{os.getpid()}.part")
        kept = ((key, result) for key, result in self.known.items() if key in keys)
        try:
            part.write_text("".join(
                json.dumps([key, result if isinstance(result, str) else result.to_json()]) + "\n"
                for key, result in kept
            ))  # fmt: skip
            part.replace(self.file)
        except OSError as error:
            tuning.entries.warn_once(f"results of compilation are not kept in {self.file}: {error}")


def attempt(launch: Launch) -> Resources | str:
    """Compile `launch`; return its resources, or the message of the error."""
    try:
        return crosscompile.compiled(launch)
    except Exception as error:  # a compiler may fail in any way, which is a result too
        return f"{type(error).__name__}: {error}"[-2000:]


def processes(jobs: int | None) -> Workers:
    """Start `jobs` processes, one for each core by default, each with one thread."""
    return Workers(jobs, _begin)


def _begin() -> None:
    torch.set_num_threads(1)
    gc.disable()  # 303 kernels take 24.6 s instead of 27.6; the process collects garbage after each batch


def compile_all(launches: Iterable[Launch], pool, cache: Cache, progress) -> dict:
    """Compile the launches that the cache lacks; return key -> result of all."""
    keys = {launch.key: launch for launch in launches}
    todo = sorted((item for item in keys.items() if item[0] not in cache.known), key=lambda item: _front(item[1]))
    task = progress.add_task("compiling", total=len(keys), completed=len(keys) - len(todo), note="")
    batches = [list(group) for _, group in itertools.groupby(todo, lambda item: _front(item[1]))]
    while batches:
        futures = {pool.submit(_attempt_all, [launch for _, launch in batch]): batch for batch in batches}
        batches = []
        for future in as_completed(futures):
            batch = futures[future]
            try:
                results = future.result()
            except Died as crash:
                if len(batch) > 1:  # one of them crashes the compiler
                    batches += [[item] for item in batch]
                    continue
                results = [str(crash)]
            for (key, _), result in zip(batch, results):
                cache.add(key, result)
                progress.update(task, advance=1)
    return {key: cache.known[key] for key in keys}


def _front(launch: Launch) -> tuple:
    """Return a key that launches share if they share compiler stages, see `Architecture.same_code`."""
    return DEVICES[launch.arch].vendor, launch.what


def _attempt_all(launches: list[Launch]) -> list[Resources | str]:
    results = [attempt(launch) for launch in launches]
    gc.collect()
    gc.freeze()  # the remaining objects belong to imported modules: the collector need not visit them
    return results

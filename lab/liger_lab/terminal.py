"""Show progress and configurations in the terminal."""

import sys
import time

SECONDS_BETWEEN_LINES = 10  # of progress, where no terminal shows a bar


def parameters(meta: dict) -> str:
    """Format a configuration's meta-parameters for a cell of a table."""
    return ", ".join(f"{name} {value}" for name, value in meta.items())


def progress():
    """Make a progress bar of rich's: task, share done, count, time and a note."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bars = Progress(*columns, TextColumn("{task.fields[note]}"))
    return bars if bars.console.is_terminal else _Lines(bars)


class _Lines:
    """Print a line of progress now and then where no terminal shows a bar.

    It has the methods of `rich.progress.Progress` that are used here; all else is that bar's own.
    """

    def __init__(self, bars):
        self.bars, self.shown = bars, time.monotonic()

    def __getattr__(self, name):
        return getattr(self.bars, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def advance(self, task, advance=1):
        self.update(task, advance=advance)

    def update(self, task, **values):
        self.bars.update(task, **values)
        if time.monotonic() - self.shown < SECONDS_BETWEEN_LINES:
            return
        self.shown = time.monotonic()
        now = next(t for t in self.bars.tasks if t.id == task)
        total = "" if now.total is None else f"/{now.total:.0f}"
        line = f"{now.description}: {now.completed:.0f}{total}  {now.fields.get('note', '')}"
        print(line.rstrip(), file=sys.stderr, flush=True)

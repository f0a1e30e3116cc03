"""What is shown on a terminal: tables, and how far something is."""


def table(header, rows) -> str:
    """Columns as wide as their widest cell, two spaces apart: no terminal is so narrow that it cuts one."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def parameters(meta: dict) -> str:
    """A configuration's meta-parameters in a cell of a table."""
    return ", ".join(f"{name} {value}" for name, value in meta.items())


def progress(console=None):
    """What happens now, how much of it is done, and a note beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)

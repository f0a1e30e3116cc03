"""Tables for terminals."""


def table(header, rows) -> str:
    """Columns as wide as their widest cell, two spaces apart: no terminal is so narrow that it cuts one."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)

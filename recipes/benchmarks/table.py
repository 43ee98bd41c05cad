"""Rows of a table on the screen, printed as they come."""


def print_row(*cells: object, width: int = 14, first: int = 26) -> None:
    head, *rest = map(str, cells)
    print(head.ljust(first) + "".join(cell.rjust(width) for cell in rest), flush=True)

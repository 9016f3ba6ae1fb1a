"""Numbers as the cells of a table, and tables as Markdown."""


def count(quantity: float | None) -> str:
    """1.42 M of 1420000."""
    if quantity is None:
        return ""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if quantity >= 0.9995 * size:
            return f"{quantity / size:.4g} {unit}"
    return f"{quantity:.4g}"


def markdown(table: list[dict[str, str]]) -> str:
    kept = [name for name in table[0] if any(line[name] for line in table)]
    lines = [kept, ["---"] * len(kept), *([line[name].replace("|", "\\|") for name in kept] for line in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

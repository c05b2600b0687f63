"""Numbers and tables as a person reads them."""

from collections.abc import Iterable


def human_bytes(count: float) -> str:
    """`1.4 GB`, in powers of 1000 as disks and devices are sold."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{_three_digits(count)} {unit}"


def human_count(count: float) -> str:
    """`812`, `25.1k`, `1.31M`, `7.0B`."""
    for unit in ("", "k", "M", "B", "T"):
        if abs(count) < 999.5 or unit == "T":
            break
        count /= 1000
    return f"{count:.0f}" if not unit else f"{_three_digits(count)}{unit}"


def human_time(seconds: float) -> str:
    """`41s`, `2m05s`, `3h07m`, `2d04h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    for size, big, small, part in ((3600, "m", "s", 60), (86400, "h", "m", 3600)):
        if whole < size:
            return f"{whole // part}{big}{whole % part // (part // 60):02d}{small}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def table(rows: Iterable[tuple[str, object]]) -> str:
    """Two columns of plain text, a line per row."""
    rows = [(name, str(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in rows)


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"

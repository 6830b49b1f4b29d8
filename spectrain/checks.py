"""Checks of single settings; the ValueError names key, value and what is allowed."""


class CheckFailed(Exception):
    """What was made is not what it must be; wrong input is a ValueError."""


def choose(key: str, value: object, allowed: tuple) -> None:
    """Raise ValueError naming key, value and allowed values unless `value` is one of them."""
    if value not in allowed:
        raise ValueError(f"{key}={value!r}: expected one of {', '.join(map(str, allowed))}")


def within(key: str, value: float, low: float, high: float) -> None:
    """Raise ValueError naming key and value unless low <= value <= high."""
    if not low <= value <= high:
        raise ValueError(f"{key}={value!r}: expected {low} to {high}")


def at_least(key: str, value: float, low: float) -> None:
    """Raise ValueError naming key and value if `value` is below `low`."""
    if not value >= low:
        raise ValueError(f"{key}={value!r}: expected at least {low}")


def above_zero(key: str, value: float, high: float = float("inf")) -> None:
    """Raise ValueError naming key and value unless 0 < value <= high."""
    if not 0 < value <= high:
        most = "" if high == float("inf") else f", at most {high:g}"
        raise ValueError(f"{key}={value!r}: expected above 0{most}")

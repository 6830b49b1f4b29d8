"""Which family is exported for which engine: `python -m spectrain.export_forms` writes docs/export.md.

A family's file says it: SERVED, by engine the folder of its form below export/ and the engine's name of the
method; NOT_SERVED, by engine why there is none. Two engines with one folder read the same files. Writes no
export.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

from spectrain.artifacts import write_bytes
from spectrain.compose import families
from spectrain.config import ENGINES

BEGIN = "<!-- written by python -m spectrain.export_forms -->\n"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "export.md"


def forms(family: str, engines: Sequence[str]) -> dict[str, list[str]]:
    """The folders of an export and the engines that read each.

    Raises ValueError with the reason for an engine that serves no export of this family.
    """
    module = importlib.import_module(f"spectrain.drafters.{family}")
    found: dict[str, list[str]] = {}
    for engine in engines:
        if engine not in module.SERVED:
            raise ValueError(f"export.engine={engine}: no export of {family}: {module.NOT_SERVED[engine]}")
        found.setdefault(module.SERVED[engine][0], []).append(engine)
    return found


def method(family: str, engine: str) -> str | None:
    """What `engine` calls the method of a family; None where it does not serve it."""
    return importlib.import_module(f"spectrain.drafters.{family}").SERVED.get(engine, (None, None))[1]


def table() -> str:
    """By family and engine: the folder and the method's name, or why there is none; then what comes later."""
    lines = ["| family | " + " | ".join(ENGINES) + " |", "| --- " * (len(ENGINES) + 1) + "|"]
    for family in families():
        module = importlib.import_module(f"spectrain.drafters.{family}")
        cells = []
        for engine in ENGINES:
            if engine in module.SERVED:
                folder, name = module.SERVED[engine]
                cells.append(f"`{folder}`, method `{name}`")
            else:
                cells.append(f"no: {module.NOT_SERVED[engine]}")
        lines.append(f"| {family} | " + " | ".join(cells) + " |")
    lines += ["", "P-EAGLE, DFlash and DSpark: neither drafter nor export yet; they come later."]
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """docs/export.md with the table of now behind BEGIN."""
    head, begin, _ = text.partition(BEGIN)
    assert begin, f"{PAGE}: no line {BEGIN!r}"
    return head + begin + table()


if __name__ == "__main__":
    write_bytes(PAGE, page(PAGE.read_text()).encode())

"""recipes/README.md from the heads of the recipes: `python -m spectrain.recipe_index` writes it.

A head is the comment at the top of a recipe: a title, then paragraphs of which each later line is indented.
Reads no setting.
"""

from importlib.resources import files
from pathlib import Path

from spectrain.artifacts import write_bytes
from spectrain.compose import recipe_names

INTRODUCTION = """\
# Recipes

`python -m spectrain recipe=NAME` runs one; whatever it leaves out stands in `spectrain/config.py` and, for
the drafter, in `spectrain/drafters/FAMILY.py`. `python -m spectrain.recipe_index` writes this page from the
heads of the files.

| recipe | what it is |
| --- | --- |
"""


def head(text: str) -> list[str]:
    """Title and paragraphs of a recipe's head."""
    found: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        line = line.removeprefix("#").removeprefix(" ")
        if line.startswith("  "):
            found[-1] += " " + line.strip()
        else:
            found.append(line.strip())
    return found


def index(recipes: dict[str, str]) -> str:
    """The page; recipes: YAML text by name."""
    heads = {name: head(text) for name, text in recipes.items()}
    rows = "".join(f"| [{name}](#{name}) | {title} |\n" for name, (title, *_) in heads.items())
    sections = [
        f"\n## {name}\n\n{title}.\n\n" + "".join(f"- {line}\n" for line in lines)
        for name, (title, *lines) in heads.items()
    ]
    return INTRODUCTION + rows + "".join(sections)


def packaged() -> dict[str, str]:
    """YAML text by name of the recipes that the package carries."""
    folder = files("spectrain.recipes")
    return {name: folder.joinpath(f"{name}.yaml").read_text() for name in recipe_names()}


if __name__ == "__main__":
    write_bytes(Path(__file__).resolve().parents[1] / "recipes" / "README.md", index(packaged()).encode())

"""recipes/README.md says what the heads of the recipes say."""

from pathlib import Path

import pytest

from spectrain.compose import compose
from spectrain.recipe_index import head, index, packaged

RECIPE = """\
# A title
# Source: one paper,
#   second line.
# Hardware: none.
train: {passes: 3}
# no head any more
"""


def test_the_page_is_current():
    page = Path(__file__).parents[1] / "recipes" / "README.md"
    assert page.read_text() == index(packaged()), "run python -m spectrain.recipe_index"


def test_a_head_is_a_title_and_paragraphs():
    assert head(RECIPE) == ["A title", "Source: one paper, second line.", "Hardware: none."]


def test_the_page_has_a_row_and_a_section_for_each_recipe():
    page = index({"mine": RECIPE})
    assert page.endswith(
        "| [mine](#mine) | A title |\n\n## mine\n\nA title.\n\n"
        "- Source: one paper, second line.\n- Hardware: none.\n"
    )


@pytest.mark.parametrize("name", sorted(packaged()))
def test_every_head_names_the_hardware(name):
    assert any(line.startswith("Hardware") for line in head(packaged()[name]))


def trains(name):
    config = compose([f"recipe={name}", "corpus.path=mine.jsonl"])
    return "train" in config.stages and config.train.passes > 0


@pytest.mark.parametrize("word", ["Source", "Expected"])
@pytest.mark.parametrize("name", [name for name in sorted(packaged()) if trains(name)])
def test_the_head_of_a_recipe_that_trains_says_where_it_is_from_and_what_it_reaches(name, word):
    assert any(line.startswith(word) for line in head(packaged()[name]))


@pytest.mark.parametrize("name", [name for name in sorted(packaged()) if trains(name)])
def test_answers_written_anew_may_be_as_long_as_those_that_are_measured(name):
    config = compose([f"recipe={name}", "stages=regenerate"])
    assert config.regenerate.max_new_tokens >= config.eval.max_new_tokens

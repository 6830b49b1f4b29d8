"""The suffix automaton against counting every place by hand."""

from hypothesis import given, settings
from hypothesis import strategies as st

from spectrain.drafters.automaton import Automaton

TEXTS = st.lists(st.integers(0, 2), max_size=30)


def places(text, part):
    """Ends of the occurrences of `part`."""
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


def grown(text, depth):
    found = Automaton(depth)
    for token in text:
        found.extend(token)
    return found


def state_of(automaton, part):
    state = 0
    for token in part:
        state = automaton.follows[state].get(token)
        if state is None:
            return None
    return state


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 6))
def test_every_short_string_has_the_count_and_the_newest_place_of_its_occurrences(text, depth):
    automaton = grown(text, depth)
    parts = {tuple(text[a:b]) for a in range(len(text)) for b in range(a + 1, a + depth + 1)}
    for part in parts:
        state, ends = state_of(automaton, part), places(text, list(part))
        assert (automaton.count[state], automaton.newest[state]) == (len(ends), ends[-1])
        assert automaton.length[automaton.link[state]] < len(part) <= automaton.length[state]
    assert state_of(automaton, (3,)) is None


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(1, 5))
def test_the_match_is_the_longest_suffix_that_occurred_before(text, most):
    state, size = grown(text, most + 1).earlier(most)
    sizes = range(min(most, len(text) - 1), 0, -1)
    assert size == next((n for n in sizes if len(places(text, text[-n:])) > 1), 0)
    assert state == state_of(grown(text, most + 1), text[len(text) - size :])


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, st.integers(1, 5))
def test_another_text_is_followed_by_its_longest_suffix_that_is_known(known, text, most):
    automaton, at = grown(known, most + 1), (0, 0)
    for i, token in enumerate(text):
        at = automaton.behind(*at, token, most)
        so_far = text[: i + 1]
        sizes = range(min(most, i + 1), 0, -1)
        size = next((n for n in sizes if places(known, so_far[-n:])), 0)
        assert at == (state_of(automaton, so_far[len(so_far) - size :]), size)


def test_states_and_moves_grow_with_the_text_and_not_with_its_square():
    """At most 2n states and 3n moves (Blumer et al. 1985), also for a text that repeats itself."""
    for text in ([0] * 500, [0, 1] * 250, [0] * 250 + [1] * 250):
        automaton = grown(text, 4)
        assert len(automaton.length) <= 2 * len(text)
        assert sum(map(len, automaton.follows)) <= 3 * len(text)

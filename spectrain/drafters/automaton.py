"""A suffix automaton that grows token by token, with the number of times each short string occurred.

A state stands for strings that end at the same places: its longest has `length` tokens, its shortest one more
than the longest of its suffix link. A new token costs amortised constant time, and at most `depth` more steps
for the counts, which are right for strings of at most `depth` tokens. Memory is linear. Knows no drafter.
Source: Blumer et al. 1985; the online form is the usual one, with clones.
"""


class Automaton:
    """Of the tokens given to `extend`. State 0 is the empty string.

    follows[s]: token -> state behind it; link[s]: state of the longest suffix that ends at more places;
    length[s]; count[s]: places where the strings of s end; newest[s]: the last of them. tip: (state, length)
    of the newest tokens, at most `depth` of them.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.follows: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.newest = [0], [0], [0], [0]
        self.tip = (0, 0)
        self._last = self._size = 0

    def extend(self, token: int) -> None:
        """Take in one more token."""
        self._size += 1
        new = self._add(self._size, {}, 0, 0, 0)
        below: int | None = self._last
        while below is not None and token not in self.follows[below]:
            self.follows[below][token] = new
            below = self._above(below)
        if below is not None:
            self.link[new] = self._exactly(below, token)
        self._last = new
        state, size = self.tip
        self.tip = self.behind(self.shorten(state, size), size, token, self.depth)
        state = self.tip[0]
        while state:
            self.count[state] += 1
            self.newest[state] = self._size
            state = self.link[state]

    def behind(self, state: int, size: int, token: int, most: int) -> tuple[int, int]:
        """State and length of the longest known suffix, at most `most` tokens, of a string of `size` tokens
        in `state` with `token` behind it."""
        while state and token not in self.follows[state]:
            state = self.link[state]
            size = self.length[state]
        if token not in self.follows[state]:
            return 0, 0
        size = min(size + 1, most)
        return self.shorten(self.follows[state][token], size), size

    def shorten(self, state: int, size: int) -> int:
        """The state of the last `size` tokens of a string in `state`."""
        while state and size <= self.length[self.link[state]]:
            state = self.link[state]
        return state

    def earlier(self, most: int) -> tuple[int, int]:
        """State and length of the longest suffix of the text, at most `most` < depth tokens, that also ends
        at an earlier place."""
        state, size = self.tip
        while state and self.count[state] < 2:
            state = self.link[state]
            size = self.length[state]
        size = min(size, most)
        return self.shorten(state, size), size

    def _add(self, length: int, follows: dict[int, int], link: int, count: int, newest: int) -> int:
        self.length.append(length)
        self.follows.append(follows)
        self.link.append(link)
        self.count.append(count)
        self.newest.append(newest)
        return len(self.length) - 1

    def _above(self, state: int) -> int | None:
        return self.link[state] if state else None

    def _exactly(self, below: int, token: int) -> int:
        """The state whose longest string is that of `below` with `token` behind it, split off where
        needed."""
        old = self.follows[below][token]
        wanted = self.length[below] + 1
        if self.length[old] == wanted:
            return old
        clone = self._add(wanted, dict(self.follows[old]), self.link[old], self.count[old], self.newest[old])
        state: int | None = below
        while state is not None and self.follows[state].get(token) == old:
            self.follows[state][token] = clone
            state = self._above(state)
        self.link[old] = clone
        return clone

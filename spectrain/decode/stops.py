"""Where a text ends: stop tokens, stop strings, budget; and what of the text a stop string leaves.

A stop string is complete at the first token whose text, decoded with all tokens before it and without special
tokens, contains it: it may begin and end inside tokens. That token is the last of the ids; the text is cut to
end with the string. Knows no model and no tree.

    stop string "END"     ids  xE | ND! | more     kept  xE | ND!     text "xEND"
"""

from collections.abc import Callable, Sequence
from functools import partial

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders show for part of a character


class StopStrings:
    """The stop strings of a call. Raises ValueError for strings that no text can contain."""

    def __init__(self, strings: Sequence[str], tokenizer):
        if isinstance(strings, str) or not all(strings):
            raise ValueError(f"stop_strings={strings!r}: expected a list of non-empty strings")
        if tokenizer is None:
            raise ValueError(f"stop_strings={list(strings)}: the target has no tokenizer to find them with")
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        for string in strings:
            if hidden := [token for token in special if token in string]:
                raise ValueError(
                    f"stop_strings: {string!r} holds {hidden[0]!r}, a special token: no text shows it"
                )
        self.strings = tuple(strings)
        self.decode: Callable[[list[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)

    def cut(self, text: str) -> str:
        """`text` up to the end of the stop string that is complete first; all of it if it holds none."""
        ends = (text.find(string) + len(string) for string in self.strings if string in text)
        return text[: min(ends, default=len(text))]


class Tail:
    """The newest characters of one growing text, enough to see a stop string become complete."""

    def __init__(self, stops: StopStrings):
        self.stops = stops
        self.kept = max(map(len, stops.strings)) - 1
        self.text = ""  # the newest settled characters, `kept` at most
        self.ids: list[int] = []  # the tokens settled last, then those that are not yet
        self.settled = 0
        self.before = ""  # the text of the settled ids

    def push(self, token: int) -> bool:
        """Add a token; whether a stop string is complete with it.

        Tokens are decoded behind those settled before them, since a decoder may treat a first token apart.
        """
        self.ids.append(token)
        decoded = self.stops.decode(self.ids)
        text = self.text + decoded[len(self.before) :]
        if any(string in text for string in self.stops.strings):
            return True
        if len(decoded) > len(self.before) and not decoded.endswith(UNFINISHED):
            self.text = text[max(0, len(text) - self.kept) :]
            self.ids = self.ids[self.settled :]
            self.settled = len(self.ids)
            self.before = self.stops.decode(self.ids)
        return False


def cut(
    block: Sequence[int], stop_ids: frozenset[int], budget: int, tail: Tail | None = None
) -> tuple[list[int], str | None]:
    """What of a verified block reaches the text, and the finish reason if it ends it.

    Cut at the first stop token (included) or token that completes a stop string (included), then at the
    budget; a stop inside the budget wins. With stop 2, [7, 8, 2, 9] gives [7, 8, 2] "stop" at budget 3 and
    [7, 8] "length" at budget 2.
    """
    for i, token in enumerate(block[:budget]):
        if token in stop_ids:
            return list(block[: i + 1]), "stop"
        if tail is not None and tail.push(token):
            return list(block[: i + 1]), "stop_string"
    return list(block[:budget]), "length" if len(block) >= budget else None

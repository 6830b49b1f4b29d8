"""The laws of verification by name: which proposals each takes, and what the lossy ones may give away.

Knows no arithmetic; `spectrain/decode/verify.py` says what each law does.
"""

from dataclasses import dataclass

CHAIN_LAWS = ("rejection", "block")
LOSSY_LAWS = ("typical", "thresholds")
TREE_LAWS = ("target_only", "recursive", *LOSSY_LAWS)
LAWS = CHAIN_LAWS + TREE_LAWS


def check_law(key: str, law: str, shape: str) -> None:
    """Raise ValueError naming `key` unless `law` verifies proposals of `shape`: chain, tree or static."""
    if shape != "chain" and law in CHAIN_LAWS:
        raise ValueError(f"{key}={law}: verifies chains only, expected {' or '.join(TREE_LAWS)} for a tree")
    if shape == "chain" and law == "recursive":
        raise ValueError(f"{key}={law}: a chain has no siblings, expected rejection, block or a tree")
    if shape == "static" and law == "recursive":
        raise ValueError(f"{key}={law}: needs drawn siblings, a static tree's are chosen; expected a tree")


@dataclass(frozen=True, kw_only=True)
class Leniency:
    """How much more than the target's law a lossy law accepts."""

    epsilon: float = 0.09
    """typical: a token is accepted where p > min(epsilon, delta * exp(-entropy of p))."""
    delta: float = 0.3
    threshold_single: float = 1.0
    """thresholds: a token of this probability or more is accepted for certain."""
    threshold_acc: float = 1.0
    """thresholds: the acceptance of a level's first tokens together is divided by this."""

    def __post_init__(self):
        for name, value in vars(self).items():
            if not 0 < value <= 1:
                raise ValueError(f"leniency.{name}={value!r}: expected above 0, at most 1")

    def of(self, law: str) -> dict[str, float]:
        """The settings that `law` reads, by name; none for a lossless one."""
        read = {"typical": ("epsilon", "delta"), "thresholds": ("threshold_single", "threshold_acc")}
        return {name: vars(self)[name] for name in read.get(law, ())}

    def check(self, law: str, key: str) -> None:
        """Raise ValueError naming `key` for settings without effect on `law`, and for thresholds that are
        not lossy."""
        default, mine = vars(Leniency()), self.of(law)
        for name, value in vars(self).items():
            if name not in mine and value != default[name]:
                raise ValueError(f"{key}.{name}={value!r}: has no effect on law {law}, expected no value")
        if law == "thresholds" and self.threshold_single == self.threshold_acc == 1:
            raise ValueError(f"{key}: thresholds of 1 are law target_only, expected one below 1")

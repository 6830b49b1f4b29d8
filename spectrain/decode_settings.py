"""Settings of one decoding run: how much is drafted, how it is verified, how tokens are chosen."""

from dataclasses import dataclass, field

from spectrain.checks import above_zero, at_least, choose, within
from spectrain.laws import LAWS, LOSSY_LAWS, Leniency, check_law
from spectrain.trees import check_paths


@dataclass(frozen=True, kw_only=True)
class DecodeRunConfig:
    """One run of the evaluation: every prompt decoded once with these settings, beside the plain baseline."""

    name: str
    drafter: str = ""
    """Who drafts: "", the recipe's drafter, or a family without weights, such as ngram."""
    proposal: str = "chain"
    """chain, tree (grown where the drafter is surest), or static (the tree of `paths`)."""
    length: int = 5
    """Draft tokens of a chain; depth of a tree; of a static one its paths say."""
    nodes: int = 24
    """Draft tokens of a tree; of a static one its paths say."""
    top_k: int = 8
    """Children per expanded node of a tree."""
    paths: list[list[int]] = field(default_factory=list)
    """Nodes of a static tree, each the ranks from the root to it: [[0], [1], [0, 0]] (spectrain/trees.py)."""
    adaptive: bool = False
    """Draft less where the drafter's confidence says that more does not pay."""
    costs: list[float] = field(default_factory=list)
    """Prices for `adaptive` in plain steps: [a round that drafts nothing, a draft step, a token to verify];
    empty: measured when the evaluation starts."""
    law: str = "rejection"
    """rejection or block (chain), target_only (any tree), recursive (a tree drawn without replacement), or
    the lossy typical and thresholds (both shapes); at temperature 0 all are the greedy limit."""
    leniency: Leniency = field(default_factory=Leniency)
    """Of the lossy laws."""
    temperature: float = 0.0
    top_k_filter: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    """Least share of the largest probability, after the other filters; 0: off."""
    repetition_penalty: float = 1.0
    """Of tokens in prompt or text; 1: off. This and the next two: formulas in docs/math.md."""
    presence_penalty: float = 0.0
    """Of tokens in the text, once; -2 to 2."""
    frequency_penalty: float = 0.0
    """Of tokens in the text, per occurrence; -2 to 2."""
    draft_temperature: float = 0.0
    """Temperature of the draft law; 0: as the target's. Lossless whatever it is."""
    dtype: str = "bfloat16"
    batch: int = 1
    graphs: bool = False
    """Replay the calls of each round as CUDA graphs, of plain decoding too; needs a CUDA device."""
    prompts: int = 0
    """The first so many of the evaluation's prompts; 0: all."""

    def __post_init__(self):
        key = f"eval.runs.{self.name}"
        at_least(f"{key}.prompts", self.prompts, 0)
        choose(f"{key}.proposal", self.proposal, ("chain", "tree", "static"))
        choose(f"{key}.law", self.law, LAWS)
        choose(f"{key}.dtype", self.dtype, ("float32", "bfloat16"))
        at_least(f"{key}.length", self.length, 1)
        at_least(f"{key}.batch", self.batch, 1)
        at_least(f"{key}.temperature", self.temperature, 0.0)
        at_least(f"{key}.draft_temperature", self.draft_temperature, 0.0)
        if self.temperature == 0 and self.draft_temperature:
            raise ValueError(
                f"{key}.draft_temperature={self.draft_temperature!r}: expected 0 at temperature 0"
            )
        at_least(f"{key}.top_k_filter", self.top_k_filter, 0)
        above_zero(f"{key}.top_p", self.top_p, 1.0)
        within(f"{key}.min_p", self.min_p, 0.0, 1.0)
        above_zero(f"{key}.repetition_penalty", self.repetition_penalty)
        within(f"{key}.presence_penalty", self.presence_penalty, -2.0, 2.0)
        within(f"{key}.frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in ("top_k_filter", "top_p", "min_p"):
            if self.temperature == 0 and self._changed(name):
                raise ValueError(f"{key}.{name}={getattr(self, name)!r}: no effect at temperature 0")
        if self.proposal == "tree":
            at_least(f"{key}.nodes", self.nodes, 1)
            at_least(f"{key}.top_k", self.top_k, 1)
        check_law(f"{key}.law", self.law, self.proposal)
        if self.law == "recursive" and self.adaptive:
            raise ValueError(f"{key}.adaptive=True: law recursive draws its tree in full, expected False")
        self.leniency.check(self.law, f"{key}.leniency")
        if self.lossy and self.temperature == 0:
            raise ValueError(f"{key}.law={self.law}: has no effect at temperature 0, expected a lossless law")
        self._derive_static(key)
        self._check_costs(key)

    @property
    def lossy(self) -> bool:
        """Whether the text is not the target's own, by the law's design."""
        return self.law in LOSSY_LAWS

    def check_shape(self) -> None:
        """Raise ValueError for settings of a tree where none is grown. Asked at the door alone: the chain of
        the baseline keeps the headline's, as results on disk have it."""
        for name in ("top_k",) if self.proposal == "static" else ("nodes", "top_k"):
            if self.proposal != "tree" and self._changed(name):
                raise ValueError(
                    f"eval.runs.{self.name}.{name}={getattr(self, name)}: no effect with "
                    f"proposal={self.proposal}; expected proposal=tree, or no value"
                )

    def _changed(self, name: str) -> bool:
        return getattr(self, name) != type(self).__dataclass_fields__[name].default

    def _derive_static(self, key: str) -> None:
        """Length and nodes of a static tree from its paths, which no other proposal has."""
        if self.proposal != "static":
            if self.paths:
                raise ValueError(f"{key}.paths: no effect with proposal={self.proposal}; expected []")
            return
        paths = check_paths(f"{key}.paths", self.paths)
        for name, derived in (("length", len(paths[-1])), ("nodes", len(paths))):
            if self._changed(name) and getattr(self, name) != derived:
                raise ValueError(f"{key}.{name}={getattr(self, name)}: the paths say {derived}; leave it out")
            object.__setattr__(self, name, derived)

    def _check_costs(self, key: str) -> None:
        if self.costs and not self.adaptive:
            raise ValueError(f"{key}.costs={self.costs}: no effect without adaptive; expected []")
        good = len(self.costs) in (0, 3) and all(0 <= c < float("inf") for c in self.costs)
        if not good or self.costs[:1] == [0.0]:
            raise ValueError(
                f"{key}.costs={self.costs}: expected [], or [root, step, node] with root above 0 and no "
                "other below 0"
            )

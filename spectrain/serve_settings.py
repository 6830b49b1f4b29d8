"""The section `serve` of the settings: the exported drafter in the user's own vLLM.

Knows no vLLM and starts nothing (`spectrain/serve_check.py` does).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from spectrain.checks import above_zero, at_least


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    python: str = ""
    """Python of an environment with vLLM, which the stage serve_check starts; empty: this one."""
    drafter: str = ""
    """Exported folder that is served; empty: the run's own, in export/."""
    prompts: int = 40
    """First turns of eval.prompts, spread over the categories; 0: all."""
    tokens: int = 128
    """Longest answer in tokens."""
    length: int = 3
    """Draft tokens of a verification."""
    batch: int = 8
    """Requests decoded at once, there and here."""
    bound: float = 0.03
    """Largest relative difference of the mean acceptance lengths of both engines."""

    def __post_init__(self):
        at_least("serve.prompts", self.prompts, 0)
        for name in ("tokens", "length", "batch"):
            at_least(f"serve.{name}", getattr(self, name), 1)
        above_zero("serve.bound", self.bound)

    def check(self, engines: Sequence[str]) -> None:
        """Raise ValueError where serve_check cannot run: `engines` of the export without vLLM, or no vLLM
        here."""
        if "vllm" not in engines:
            raise ValueError(
                f"export.engine={list(engines)}: stages=serve_check runs vllm; expected vllm among them"
            )
        if not self.python and find_spec("vllm") is None:
            raise ValueError(f"serve.python='': {sys.executable} has no vllm; expected a Python that has it")

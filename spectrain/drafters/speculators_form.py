"""The form of speculators 0.9: what the config of every drafter has there.

Its library trains and loads these folders, and vLLM serves some of them. config.json has no model_type: the
Hugging Face config of the drafter's layer lies in `transformer_layer_config`, with the target's vocabulary.
The library takes the embedding, the head and the last norm of the target from the files that
`verifier.name_or_path` names. Knows no family.
Source: speculators 0.9, its config and models.
"""

from pathlib import Path
from typing import Any

from spectrain.target import Target, resolve_path


def speculators_config(
    kind: str, architecture: str, target: Target, layer: dict[str, Any], steps: int
) -> dict[str, Any]:
    """config.json of a drafter that drafts `steps` tokens; layer: the Hugging Face config of its layer."""
    path = resolve_path(target.path)
    method = {"proposal_type": "greedy", "speculative_tokens": steps}
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{**method, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": str(Path(path).resolve()) if Path(path).is_dir() else path,
                "architectures": [type(target.model).__name__],
            },
        },
        "transformer_layer_config": {**layer, "vocab_size": target.vocab_size},
    }

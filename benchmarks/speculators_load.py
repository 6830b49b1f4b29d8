"""Does speculators 0.9 compute our logits from our export? Prints the largest difference for each drafter.

    python benchmarks/speculators_load.py        in an environment that has speculators 0.9 beside spectrain

Tiny random targets and drafters, float32: EAGLE-3 (plain; with every switch; whole vocabulary) and MTP.
The library loads the folder by itself, embedding included, and its own forward runs on the recorded draft of
the export: T rows of states with the tokens behind them, then the draft tokens. Its step k at row T - 1 reads
what our chain reads at draft k: its own output of step k - 1 there, the rows before it as they are in step 0.
Of MTP only step 0 is compared: from step 1 on, the library recomputes the rows before from their own outputs.
EAGLE-1, Medusa and Hydra are not in speculators 0.9. Exit code 1 where a difference exceeds 1e-4.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from transformers import Qwen3Config, Qwen3ForCausalLM

from spectrain.artifacts import read_tensors
from spectrain.config import ExportConfig, RunConfig
from spectrain.drafters import eagle3, mtp
from spectrain.export import export, record
from spectrain.target import Target
from spectrain.testing import tiny_llama

V, BOUND = 260, 1e-4
EAGLE3 = {
    "eagle3": {"taps": [1, 3, 4], "draft_vocab": 130},
    "eagle3, other switches": {
        "taps": [0, 2],
        "draft_vocab": 130,
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
    },
    "eagle3, whole vocabulary": {"taps": [1, 3, 4], "draft_vocab": 0},
}


def exported(family, settings: dict, model, root: Path) -> tuple[Path, torch.nn.Module, Target]:
    """A random drafter's folder in the form of speculators, beside its target's."""
    model.save_pretrained(root / "target")
    target = Target(model, path=str(root / "target"))
    kept = torch.arange(0, V, 2) if settings.get("draft_vocab") else torch.arange(V)
    drafter = family.build(family.Config(**settings), target, kept).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    config = RunConfig(
        recipe="trial", drafter=drafter.config, export=ExportConfig(engine=["speculators"], dtype="float32")
    )
    (folder,) = export(config, target, drafter, root / "export")
    return folder, drafter, target


def loaded(folder: Path):
    """The library's model, with attention that runs uncompiled on a CPU, and the logits of its forwards."""
    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(str(folder), config=config).eval()
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _, inputs, logits: seen.append(logits[0]))
    return model, seen


def ids_of(rows_ND: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The ids [N] whose rows of the library's own embedding or head these are."""
    same = (rows_ND[:, None] == weight_VD[None]).all(-1)
    assert (same.sum(-1) == 1).all(), "the library holds other weights"
    return same.nonzero()[:, 1]


@torch.no_grad()
def eagle3_difference(settings: dict, root: Path) -> float:
    folder, _, _ = exported(eagle3, settings, tiny_llama(layers=8), root)
    fixture = read_tensors(folder / "check" / "replay.safetensors")
    rows, steps = len(fixture["taps"]), len(fixture["logits"])
    model, seen = loaded(folder)
    ids = ids_of(fixture["embeds"], model.embed_tokens.weight)
    padded = torch.zeros(len(ids), fixture["taps"].flatten(1).shape[1])  # rows that no compared one sees
    padded[:rows] = fixture["taps"].flatten(1)
    model(padded[None], ids[None], torch.zeros(1, len(ids), dtype=torch.long), ttt_steps=steps)
    theirs = torch.stack([logits[rows - 1] for logits in seen])
    return (theirs - fixture["logits"]).abs().max().item()


@torch.no_grad()
def mtp_difference(root: Path) -> float:
    shape = Qwen3Config(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    folder, drafter, target = exported(mtp, {"unroll": 2}, Qwen3ForCausalLM(shape).float(), root)
    fixture = record(drafter, target, torch.float32)
    rows, steps = len(fixture["final"]), drafter.config.unroll
    model, seen = loaded(folder)
    ids = ids_of(fixture["embeds"][: rows + steps - 1], model.embed_tokens.weight)
    first = torch.zeros(1, dtype=torch.long)  # x_0, whose embedding no row reads
    states = torch.zeros(rows + steps + 1, fixture["final"].shape[1])
    states[:rows] = fixture["final"]
    model(torch.cat((first, ids, first))[None], states[None])
    shown = ids_of(fixture["head"], model.lm_head.weight)  # the record has the logits of some ids
    return (seen[0][rows - 1, shown] - fixture["logits"][0]).abs().max().item()


def main() -> int:
    torch.manual_seed(0)
    worst = {}
    for name, settings in EAGLE3.items():
        with TemporaryDirectory() as root:
            worst[name] = eagle3_difference(settings, Path(root))
    with TemporaryDirectory() as root:
        worst["mtp"] = mtp_difference(Path(root))
    for name, difference in worst.items():
        print(f"{name:28} largest difference of a logit {difference:.2g}")
    return int(not all(difference <= BOUND for difference in worst.values()))


if __name__ == "__main__":
    sys.exit(main())

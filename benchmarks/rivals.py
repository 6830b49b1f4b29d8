"""Training steps of other projects on our tensors: called here, none of their code is.

    git clone https://github.com/OWNER/NAME FOLDER/NAME && git -C FOLDER/NAME checkout COMMIT

for each OWNER/NAME and COMMIT of SOURCES, then `python benchmarks/train_step.py --rivals FOLDER`. Nothing has
to be installed: a source tree is read from its folder, and what it imports without using it in a step (numba,
openai, fastchat) is replaced by an empty stand-in.

Each function takes the tensors and returns the trained module and its loss as a function. What is called:
SpecForge     TargetHead, build_offline_teacher_inputs, OnlineEagle3Model ("sdpa"); its loss is a Triton
              kernel, here its own compiled reference of that.
TorchSpec     compute_target_p_padded, Eagle3Model ("sdpa", no gradient checkpointing).
speculators   Eagle3DraftModel ("sdpa") under torch.compile, its fastest form on CPU, with its eager kl_div.
              Its head is frozen.
DeepSpec      Qwen3Eagle3Model, compute_eagle3_loss. One frozen head for drafter and target, so its head has
              our draft vocabulary. Three changes, all in its favour: flex attention, which has no backward on
              CPU, is torch's fused attention with the same mask; the Triton loss is a fused one in torch; the
              norms of queries and keys are taken out, so that the network is the others'.
Medusa        MedusaModel.forward, CustomizedTrainer.compute_loss (train_legacy.py), on a target that returns
              the states. All heads share one, which it trains.

SpecForge and TorchSpec run the target's whole head in every step, for the arg-max; ours reads it from the
features. Knows nothing of ours but the tensors.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, Qwen3Config

SOURCES = {
    "SpecForge": ("sgl-project/SpecForge", "a6b6b0230009d15ec2a97a57384e6f53f0f96946", ["."]),
    "TorchSpec": ("lightseekorg/TorchSpec", "6f21829cd0e333c3b54d9d2706a0b0c8dc10de9d", ["."]),
    "speculators": (
        "vllm-project/speculators",
        "c05b95b303f7d4f21e8d7624e0ffa1c2d9b4d73b",
        ["src", "hs_connectors/src"],
    ),
    "DeepSpec": ("deepseek-ai/DeepSpec", "afdfa7c9382a3341a3e6f17756dd816da79f132c", ["."]),
    "Medusa": ("FasterDecoding/Medusa", "e2a5d20c048a9b0a4092e6933c34313687422518", ["."]),
}
DECAY = 0.8  # weight of slot k: DECAY ** k
Step = tuple[nn.Module, Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Given:
    """One packed row of T tokens, batch 1. slots: steps of the unroll, or heads. taps [1, T, 3 D]; final
    [1, T, D]; ids, rows, labels [1, T]: rows is 1 where token t + 2 is supervised, which is the label of row
    t at slot 0; labels are ids, -100 outside the spans. head [V, D] of the target, embedding [V, D], kept
    [W] ids of the draft vocabulary; weights: our drafter's.
    """

    config: LlamaConfig
    slots: int
    ids: torch.Tensor
    rows: torch.Tensor
    labels: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor
    head: torch.Tensor
    embedding: torch.Tensor
    kept: torch.Tensor
    weights: dict[str, torch.Tensor]

    def pairs(self) -> int:
        """(row, slot) pairs that are trained: those whose label is supervised."""
        return sum(int(self.rows[:, k:].sum()) for k in range(self.slots))

    def layer(self, name: str) -> dict[str, torch.Tensor]:
        """Our drafter's weights with its layer called `name`, and the embedding."""
        renamed = {key.replace("midlayer", name): value for key, value in self.weights.items()}
        return renamed | {"embed_tokens.weight": self.embedding}

    def maps(self) -> dict[str, torch.Tensor]:
        """t2d: bool [V]; d2t: offset [W] of a kept id from its place."""
        t2d = torch.zeros(len(self.head), dtype=torch.bool)
        t2d[self.kept] = True
        return {"t2d": t2d, "d2t": self.kept - torch.arange(len(self.kept))}

    def draft_config(self) -> LlamaConfig:
        config = LlamaConfig(**{**self.config.to_dict(), "num_hidden_layers": 1})
        config.draft_vocab_size, config.pretraining_tp, config.rope_scaling = len(self.kept), 1, None
        return config


def find(name: str, folder: Path) -> None:
    """Make a source tree importable. Raises ValueError with the command that obtains it."""
    repository, commit, paths = SOURCES[name]
    place = folder / name
    if not place.is_dir():
        clone = f"git clone https://github.com/{repository} {place} && git -C {place} checkout {commit}"
        raise ValueError(f"--rivals {folder}: no folder {name}; expected it from: {clone}")
    sys.path[:0] = [str(place / path) for path in paths]


def stand_in(*names: str) -> None:
    """Empty modules for what a tree imports and its step does not use."""
    sys.modules.update({name: MagicMock() for name in names})


def decayed(losses) -> torch.Tensor:
    return sum(DECAY**k * loss for k, loss in enumerate(losses))


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Row t holds what row t + 1 held; the last holds zeros."""
    return torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)


def load(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Copy; every trained tensor of the module must be among them."""
    missing, unexpected = module.load_state_dict(weights, strict=False)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert not unexpected and not trained & set(missing), (missing, unexpected)


def specforge(given: Given) -> Step:
    import specforge.algorithms.eagle3.model as eagle3
    from specforge.core.compact_teacher import build_offline_teacher_inputs
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead

    eagle3.LogSoftmaxLoss = SimpleNamespace(apply=_compute_loss)
    config = given.draft_config()
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    load(draft, given.layer("midlayer") | given.maps())
    draft.freeze_embedding()
    model = eagle3.OnlineEagle3Model(draft, length=given.slots, attention_backend="sdpa").train()
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        teacher = TargetHead(folder)
    load(teacher, {"fc.weight": given.head})
    teacher.freeze_weights()

    def loss():
        ids, states, mask = teacher.preprocess(given.ids, given.final, given.rows)
        target, more = build_offline_teacher_inputs(
            compact=False, target_model=teacher, target_hidden=states, chunk_size_arg=None
        )
        found = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            target=target,
            loss_mask=mask,
            hidden_states=given.taps,
            **more,
        )
        return decayed(found[0])

    return model, loss


def torchspec(given: Given) -> Step:
    stand_in("numba")
    from torchspec.models.draft.llama3_eagle import LlamaForCausalLMEagle3
    from torchspec.models.eagle3 import Eagle3Model, compute_target_p_padded
    from torchspec.utils.tensor import padding

    draft = LlamaForCausalLMEagle3(given.draft_config(), attention_backend="sdpa")
    load(draft, given.layer("midlayer") | given.maps())
    draft.freeze_embedding()
    model = Eagle3Model(draft, length=given.slots, attention_backend="sdpa").train()

    def loss():
        target = compute_target_p_padded(
            target_hidden_states=padding(given.final, left=False),
            target_lm_head_weight=given.head,
            t2d=draft.t2d,
            loss_mask=given.rows,
            length=given.slots,
        )
        losses, _, _ = model(
            input_ids=padding(given.ids, left=False),
            attention_mask=torch.ones_like(given.ids),
            target=target,
            loss_mask=given.rows,
            hidden_states=given.taps,
        )
        return decayed(losses)

    return model, loss


def speculators(given: Given) -> Step:
    stand_in("openai", "openai.types", "openai.types.chat", "openai.types.completion")
    installed = metadata.version
    metadata.version = lambda name: "0.0.0" if name == "speculators" else installed(name)
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel

    layer = LlamaConfig(**{**given.config.to_dict(), "num_hidden_layers": 1})
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(given.kept),
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    )
    model = Eagle3DraftModel(config).train()
    model.load_vocab_mappings(**given.maps())
    for frozen in (model.embed_tokens, model.verifier_lm_head, model.verifier_norm, model.lm_head):
        frozen.requires_grad_(False)
    load(model, given.layer("layers.0") | {"verifier_lm_head.weight": given.head[given.kept]})
    nn.init.ones_(model.verifier_norm.weight)
    forward, kl = torch.compile(model.forward), resolve_loss_config("kl_div", "eager")

    def loss():
        _, found, _ = forward(
            hidden_states=given.taps,
            input_ids=shifted(given.ids),
            document_ids=torch.zeros_like(given.ids),
            loss_mask=given.rows,
            verifier_last_hidden_states=shifted(given.final),
            ttt_steps=given.slots,
            ttt_step_loss_decay=DECAY,
            loss_config=kl,
        )
        return found

    return model, loss


class _SoftCrossEntropy(torch.autograd.Function):
    """sum_rows mask (lse(x) - p x) / normalizer; keeps the logits and writes the gradient over them."""

    @staticmethod
    def forward(ctx, logits, p, mask, normalizer):
        lse = logits.logsumexp(-1)
        ctx.save_for_backward(logits.detach(), p, mask, lse)
        ctx.normalizer = normalizer
        rows = lse - torch.linalg.vecdot(logits, p)
        return (rows * mask[..., 0]).sum() / normalizer

    @staticmethod
    def backward(ctx, grad):
        x, p, mask, lse = ctx.saved_tensors
        x.sub_(lse[..., None]).exp_().sub_(p).mul_(mask * (grad / ctx.normalizer))
        return x, None, None, None


def deepspec(given: Given) -> Step:
    import deepspec.modeling.eagle3.loss as losses
    import deepspec.modeling.eagle3.qwen3.modeling as modeling

    def mask(*, attention_mask, q_len, kv_len, lck, device):
        """Step 0: causal; the others: the row's own column. All rows are valid in a packed row."""
        query, key = torch.arange(q_len)[:, None], torch.arange(kv_len)
        return torch.where(key < q_len, key <= query, (key - query) % q_len == 0)[None, None]

    def attention(query, key, value, block_mask, enable_gqa):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=block_mask, enable_gqa=enable_gqa)

    losses.FusedLogSoftmaxLoss = _SoftCrossEntropy
    modeling.create_eagle3_attention_mask = mask
    modeling.compile_friendly_flex_attention = modeling.flex_attention = attention
    shape = given.config.to_dict()
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Qwen3Config(
        **{name: shape[name] for name in (*names, "rms_norm_eps", "rope_parameters")},
        num_hidden_layers=1,
        vocab_size=len(given.kept),
        tie_word_embeddings=False,
    )
    config.target_layer_ids, config.ttt_length, config.step_loss_decay = [0, 1, 2], given.slots, DECAY
    config._attn_implementation = "flex_attention"
    model = modeling.Qwen3Eagle3Model(config).train()
    attn = model.layers[0].self_attn
    attn.q_norm = attn.k_norm = nn.Identity()
    model.embed_tokens = nn.Embedding(*given.embedding.shape)  # only its head must be the draft vocabulary's
    model.set_embedding_head_trainable(False)
    load(model, given.layer("layers.0"))
    batch = {
        "input_ids": given.ids,
        "attention_mask": torch.ones_like(given.ids),
        "loss_mask": given.rows,
        "target_hidden_states": given.taps,
        "target_last_hidden_states": given.final,
    }

    def loss():
        return losses.compute_eagle3_loss(
            model=model, batch=batch, ttt_length=given.slots, step_loss_decay=DECAY
        )

    return model, loss


def medusa(given: Given) -> Step:
    stand_in("fastchat", "fastchat.conversation", "fastchat.model", "fastchat.model.model_adapter")
    import transformers.utils

    transformers.utils.is_flash_attn_available = lambda: False
    import medusa.model.medusa_model_legacy as model_file
    from medusa.train.train_legacy import CustomizedTrainer

    model_file.AutoTokenizer = MagicMock()

    class Backbone(nn.Module):
        def forward(self, **_):
            return (given.final,)

    class Target(nn.Module):
        dtype, device, config = torch.float32, torch.device("cpu"), given.config

        def __init__(self):
            super().__init__()
            self.model = Backbone()
            self.lm_head = nn.Linear(given.head.shape[1], len(given.head), bias=False)

    model = model_file.MedusaModel(Target(), given.slots, 1)
    weights = {"base_model.lm_head.weight": given.head}
    for k in range(given.slots):
        for part in ("weight", "bias"):
            weights[f"medusa_head.{k}.0.linear.{part}"] = given.weights[f"blocks.{k}.layers.0.{part}"]
    load(model, weights)
    inputs = {
        "input_ids": given.ids,
        "attention_mask": torch.ones_like(given.ids),
        "labels": given.labels,
    }
    trainer = SimpleNamespace(log=lambda _: None)
    return model, lambda: CustomizedTrainer.compute_loss(trainer, model, inputs)


STEPS = {
    "SpecForge": specforge,
    "TorchSpec": torchspec,
    "speculators": speculators,
    "DeepSpec": deepspec,
    "Medusa": medusa,
}

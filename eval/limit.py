"""How fast could this drafter be on a named GPU? A model of bytes and arithmetic, not a measurement.

A pass over N tokens of each of B requests, with L tokens of context, takes at least

    T(N) = max((W(B N) + B (L + N) kv) / bandwidth, (2 P B N + attention) / arithmetic)

W: bytes of the weights that B N tokens touch, all of them unless they are routed experts, of which m tokens
touch the share 1 - (1 - k/E)^m; P: weights that one token uses; kv: bytes of its keys and values. A plain
step is T(1). With gamma draft steps and what runs once a round (EAGLE-3's fc),

    eta_limit = tau T(1) / (T(N) + gamma T_draft + T_once),    N = draft tokens + 1

Left out, since each only slows a real engine down: launches, sampling, the drafter's own keys and values,
tiles of the matrix product, the difference between peak and reachable speed. Weights and cache are bfloat16.
Source: Pope et al. 2023, section 2 and appendix (cost model); Leviathan et al. 2023, section 3 (speed-up).
Knows no engine, drafter or file.
"""

from dataclasses import dataclass

from spectrain.target import Target

BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Gpu:
    """Bytes per second of its memory and dense bfloat16 FLOPs per second."""

    bandwidth: float
    arithmetic: float


GPUS = {
    "h200": Gpu(4.8e12, 989e12),  # NVIDIA's data sheet
    "h100": Gpu(3.35e12, 989e12),  # NVIDIA's data sheet, SXM
    "h200_measured": Gpu(4.3e12, 782e12),  # a copy; products of 8192 x 8192 matrices, mean of 769 and 798
}


@dataclass(frozen=True)
class TargetShape:
    """What a target reads and computes.

    dense: weights that every token uses, the input embedding left out (a lookup); routed: weights of all
    routed experts, of which `active` of `experts` serve one token; kv: numbers kept per token in all layers;
    attention: FLOPs of one query against one key in all layers.
    """

    dense: int
    kv: int
    attention: int
    routed: int = 0
    experts: int = 1
    active: int = 0

    def touched(self, tokens: float) -> float:
        """Weights that `tokens` tokens use together, routed evenly and independently.

        128 experts, 8 for each token: 8 for one, 15.5 for two, 51.6 for eight.
        """
        return self.dense + self.routed * (1 - (1 - self.active / self.experts) ** tokens)


@dataclass(frozen=True)
class DraftShape:
    """Weights that one draft step reads, and those that are read once a round besides."""

    step: int
    once: int


@dataclass(frozen=True)
class Load:
    """What a round carries, in means: requests, tokens of context, draft tokens and draft steps of each,
    tokens that it emits."""

    batch: float
    context: float
    drafted: float
    draft_steps: float
    emitted: float


def step_s(gpu: Gpu, target: TargetShape, *, batch: float, context: float, tokens: float) -> float:
    """Seconds of one target pass over `tokens` tokens of each of `batch` requests, T(tokens)."""
    read = target.touched(batch * tokens) + batch * (context + tokens) * target.kv
    pairs = batch * tokens * (context + (tokens + 1) / 2)
    computed = 2 * target.touched(1) * batch * tokens + target.attention * pairs
    return max(BYTES * read / gpu.bandwidth, computed / gpu.arithmetic)


def round_cost(gpu: Gpu, target: TargetShape, drafter: DraftShape, load: Load) -> float:
    """Least cost of a round in plain steps: (T(N) + gamma T_draft + T_once) / T(1)."""
    verify = step_s(gpu, target, batch=load.batch, context=load.context, tokens=load.drafted + 1)
    plain = step_s(gpu, target, batch=load.batch, context=load.context, tokens=1)
    width = load.drafted / load.draft_steps if load.draft_steps else 0.0
    draft = load.draft_steps * _product_s(gpu, drafter.step, load.batch * width)
    return (verify + draft + _product_s(gpu, drafter.once, load.batch * load.emitted)) / plain


def eta_limit(tau: float, gpu: Gpu, target: TargetShape, drafter: DraftShape, load: Load) -> float:
    """The largest speed-up over plain decoding that `tau` tokens per round can give on `gpu`."""
    return tau / round_cost(gpu, target, drafter, load)


def target_shape(target: Target) -> TargetShape:
    """The shape of a target, its weights on any device, "meta" included."""
    config = target.config
    weights = {id(p): (name, p.numel()) for name, p in target.decoder.named_parameters()}
    weights.pop(id(target.embedding.weight), None)
    weights |= {
        id(p): (name, p.numel()) for name, p in target.head.named_parameters()
    }  # tied: read once, here
    routed = sum(count for name, count in weights.values() if ".experts." in name)
    kv, attention = _attention(config)
    shape = {"dense": sum(count for _, count in weights.values()) - routed, "kv": kv, "attention": attention}
    if not routed:
        return TargetShape(**shape)
    names = ("num_experts", "num_local_experts", "n_routed_experts")  # each family of models has its own
    experts = next(found for name in names if (found := getattr(config, name, None)))
    return TargetShape(**shape, routed=routed, experts=experts, active=config.num_experts_per_tok)


def _attention(config) -> tuple[int, int]:
    """(numbers kept per token, FLOPs per query and key) over the layers that attend; recurrent layers keep
    none per token."""
    heads = getattr(config, "num_attention_heads", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    layers = config.num_hidden_layers
    if kinds:
        layers = sum("attention" in kind and kind != "linear_attention" for kind in kinds)
    if not heads or not layers:
        return 0, 0
    if rank := getattr(config, "kv_lora_rank", None):  # multi-head latent attention, absorbed
        width = rank + config.qk_rope_head_dim
        return layers * width, layers * heads * 2 * (width + rank)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return layers * 2 * groups * head_dim, layers * heads * 4 * head_dim


def _product_s(gpu: Gpu, weights: int, rows: float) -> float:
    """Seconds of `rows` rows through `weights` weights."""
    return max(BYTES * weights / gpu.bandwidth, 2 * weights * rows / gpu.arithmetic)

"""Small targets and tokenizers whose every number can be worked out by hand; for tests and benchmarks.

Knows nothing of training or decoding. In `byte_tokenizer` one byte is one token, its id the byte's value.
"""

from itertools import count

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

MARKERS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>")  # ids 256, 257, 258, 259

GENERATION_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

CHATML = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    + GENERATION_PROMPT
)
"""Append-only: a later turn never changes what an earlier one looks like."""

THINK = (
    "{% set seen = namespace(user=-1) %}"
    "{% for turn in messages %}"
    "{% if turn.role == 'user' %}{% set seen.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.role == 'assistant' and loop.index0 > seen.user %}"
    "<think>{{ turn.reasoning_content | default('') }}</think>{% endif %}"
    "{{ turn.content }}<|im_end|>\n{% endfor %}" + GENERATION_PROMPT
)
"""Rewrites history: reasoning is shown only after the newest user turn."""

NOTHINK = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n"
    "{% if turn.role == 'assistant' and not turn.reasoning_content %}" + EMPTY_THOUGHT + "{% endif %}"
    "{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n" + EMPTY_THOUGHT + "{% endif %}"
)
"""The generation prompt itself writes an empty thought."""

TOOL = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content or '' }}"
    "{% for call in turn.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}" + GENERATION_PROMPT
)
"""Writes tool calls with their arguments as JSON."""


def byte_tokenizer(template: str = CHATML, *, auto_bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of 260 ids: the bytes, then MARKERS; with `auto_bos`, plain encoding puts <s> in front."""
    spare = count(256)
    symbols = [chr(b) if chr(b).isprintable() and b != 32 else chr(next(spare)) for b in range(256)]
    vocabulary = {symbol: b for b, symbol in enumerate(symbols)}
    vocabulary |= {marker: 256 + i for i, marker in enumerate(MARKERS)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(MARKERS))
    if auto_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 259)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
    )


def tiny_llama(
    *,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = 260,
    heads: int = 4,
    kv_heads: int = 2,
    tied: bool = False,
    seed: int = 0,
) -> LlamaForCausalLM:
    """A random float32 Llama; equal arguments give equal weights, the global random state stays as it is."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # wide enough that greedy text does not repeat one token
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float().eval()


@torch.no_grad()
def ladder_llama(*, layers: int = 4, hidden: int = 8, vocab: int = 16, norm: float = 2.0) -> LlamaForCausalLM:
    """A Llama that climbs: id i is embedded as 100 i in every channel, layer k adds 2**k, `norm` scales the end."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        mlp_bias=True,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():
        parameter.zero_()
    tokens = torch.arange(vocab)
    model.model.embed_tokens.weight.copy_(100.0 * tokens[:, None].expand(vocab, hidden))
    model.lm_head.weight[tokens, tokens % hidden] = 1.0
    model.model.norm.weight.fill_(norm)
    for k, layer in enumerate(model.model.layers):
        layer.mlp.down_proj.bias.fill_(2.0**k)
        layer.input_layernorm.weight.fill_(1.0)
        layer.post_attention_layernorm.weight.fill_(1.0)
    return model

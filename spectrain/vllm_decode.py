"""Decode prompts with vLLM, greedily, with or without a drafter.

    python vllm_decode.py REQUEST.json ANSWER.json

REQUEST: `engine` (arguments of vllm.LLM, speculative_config among them or not), `prompts` (lists of token
ids), `tokens` (of an answer), `logprobs` (most likely tokens shown per place; 0: none).
ANSWER: `version`; `texts` (lists of token ids); `likely`, for each text and place a list of [id, log
probability]; `verifications` and `per_position`, how many of them accepted draft tokens 0 to k; `seconds`.

Imports vLLM alone: it runs in the user's environment, without spectrain. Source: vLLM 0.32.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos")


def decode(request: dict[str, Any]) -> dict[str, Any]:
    """What ANSWER holds."""
    import vllm

    llm = vllm.LLM(**request["engine"])
    asked = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    shown = request["logprobs"] or None
    params = vllm.SamplingParams(temperature=0.0, max_tokens=request["tokens"], logprobs=shown)
    begin = time.perf_counter()
    outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
    seconds = time.perf_counter() - begin
    answer: dict[str, Any] = {
        "version": vllm.__version__,
        "texts": [list(output.token_ids) for output in outputs],
        "likely": [
            [[[id, found.logprob] for id, found in place.items()] for place in output.logprobs or ()]
            for output in outputs
        ],
        "seconds": seconds,
    }
    if "speculative_config" in request["engine"]:
        counters = {metric.name: metric for metric in llm.get_metrics()}
        drafts, accepted = (counters[name] for name in COUNTERS)
        answer |= {"verifications": drafts.value, "per_position": list(accepted.values)}
    return answer


if __name__ == "__main__":
    asked_for, answered = map(Path, sys.argv[1:])
    answered.write_text(json.dumps(decode(json.loads(asked_for.read_text()))))

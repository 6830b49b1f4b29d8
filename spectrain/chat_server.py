"""Answers of an OpenAI-compatible server (`POST /v1/chat/completions`: vLLM, SGLang and others), over urllib.

An answer keeps its text, reasoning and tool calls and the reason why it ended. What cannot be had raises
OSError; a request that the server refuses raises ValueError with its words. Knows no corpus.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ATTEMPTS, WAIT_S = 4, 1.0  # waits 1, 2, 4 seconds: a server that restarts behind a balancer
TIMEOUT_S = 3600
BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class ChatServer:
    """url: up to and with /v1; model: its name there; request: what every request says."""

    url: str
    model: str
    request: dict[str, Any]

    @classmethod
    def connect(cls, address: str, model: str, request: dict[str, Any]) -> "ChatServer":
        """Ask the server which models it has; ValueError naming them unless `model`, or the only one, is
        clear."""
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"regenerate.server={address!r}: expected an address, http://host:port")
        url = address.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"
        names = [entry["id"] for entry in _call(f"{url}/models", None)["data"]]
        if not model and len(names) == 1:
            model = names[0]
        if model not in names:
            raise ValueError(f"regenerate.model={model!r}: {address} has {', '.join(names) or 'none'}")
        return cls(url, model, request)

    def ask(
        self, messages: Sequence[dict[str, Any]], sampling: dict[str, Any]
    ) -> tuple[dict[str, Any], str, int]:
        """The answer to `messages`, its finish reason and its number of tokens (0 where it is not told).

        sampling: fields of the request beside model and messages; `self.request` goes before them.
        """
        body = {"model": self.model, "messages": [_wire(m) for m in messages]} | sampling | self.request
        found = _call(f"{self.url}/chat/completions", body)
        choice = found["choices"][0]
        if not choice.get("finish_reason"):
            raise ValueError(f"{self.url}: an answer without finish_reason: {json.dumps(choice)[:200]}")
        tokens = (found.get("usage") or {}).get("completion_tokens", 0)
        return _message(choice["message"]), choice["finish_reason"], tokens


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The answer as a turn of a conversation: what is null or empty on the wire is left out."""
    turn: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        turn["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = calls
    return turn


def _wire(message: dict[str, Any]) -> dict[str, Any]:
    """A turn as requests hold it: the arguments of a call are a text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        calls.append(call | {"function": function})
    return message | {"tool_calls": calls}


def _call(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON that `url` answers; a busy or absent server is asked again, a few times."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    for attempt in range(ATTEMPTS):
        request = urllib.request.Request(url, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                content = response.read()
            return _parse(url, content)
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace").strip()[:500]
            if error.code not in BUSY:
                raise ValueError(f"{url}: refused with status {error.code}: {words}") from None
            reason = f"status {error.code}: {words}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
        if attempt + 1 < ATTEMPTS:
            time.sleep(WAIT_S * 2**attempt)
    raise OSError(f"{url}: no answer in {ATTEMPTS} attempts ({reason}); the same command goes on from here")


def _parse(url: str, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not ("choices" in found or "data" in found):
        raise ValueError(f"{url}: not an OpenAI-compatible answer: {content[:200]!r}")
    return found

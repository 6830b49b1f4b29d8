"""A vLLM server asked over HTTP for the hidden states of texts, and the process of one that is started here.

One request is one text: a completion of one token whose reply names the file that the server's connector
wrote, and the log-probabilities after the last token. The file is read and deleted. Texts announced before
they are needed are asked for ahead, `target.server.requests` at once, so the server's batches stay full while
files are read. Knows no model; how the server is started by hand: docs/serving.md. Source: vLLM 0.32.
"""

import atexit
import ctypes
import fcntl
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from spectrain.data.packing import Sample
from spectrain.server_settings import ServerConfig
from spectrain.state_files import Answer, default_layer_ids, engine_layer_ids, read_states

CONNECTOR = Path(__file__).with_name("vllm_connector.py")
REQUEST_S = 3600.0  # of one request, waiting in the server's queue included
FILE_S = 120.0  # from the reply until the file is there: a connector may write after it replies
POLL_S = 0.02
ERROR = re.compile(r"\w(Error|Exception)\b.*: ")
TOP = 5  # log-probabilities asked for, to compare with ours

log = logging.getLogger(__name__)


class Server:
    """A server that runs already (`url`) or is started when it is first asked (`python`).

    model: folder or hub id that a started one serves. num_layers, hidden_size, dtype: the target's.
    """

    def __init__(
        self, config: ServerConfig, model: str, *, num_layers: int, hidden_size: int, dtype: torch.dtype
    ):
        if config.python and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("target.server.python: several processes would each start a server; use url")
        self.config, self.model = config, model
        self.num_layers, self.hidden_size, self.dtype = num_layers, hidden_size, dtype
        self.layer_ids = list(config.layer_ids) or default_layer_ids(num_layers)
        self.url, self.name = config.url.rstrip("/").removesuffix("/v1"), ""
        self.process: Process | None = None
        self.pool = ThreadPoolExecutor(config.requests)
        self.samples: Sequence[Sample] = ()
        self.coming: Iterator[Sample] = iter(())
        self.ahead: deque[tuple[torch.Tensor, Future[Answer]]] = deque()
        atexit.register(self.release)

    def announce(self, samples: Sequence[Sample]) -> None:
        """The texts that will be asked for, in order; the first `read` begins to ask for them."""
        self.samples, self.coming = samples, iter(samples)
        self.ahead.clear()

    def read(self, documents: Sequence[torch.Tensor], tap_ids: Sequence[int]) -> list[Answer]:
        """The states of each text int [T], at the layers of `tap_ids` and in front of the final norm.

        Raises ValueError naming the server, and the sample if it was announced, for a server that refuses,
        has no connector or has died.
        """
        self._open(tap_ids)
        futures = []
        for ids in documents:
            while len(self.ahead) < self.config.requests and (sample := next(self.coming, None)):
                self.ahead.append((sample.ids, self.pool.submit(self._ask, sample.ids)))
            if self.ahead and torch.equal(self.ahead[0][0].long(), ids.long()):
                futures.append(self.ahead.popleft()[1])
            else:
                futures.append(self.pool.submit(self._ask, ids))
        return [future.result() for future in futures]

    def release(self) -> None:
        """Stop a server that was started here; the next `read` starts it again."""
        for _, future in self.ahead:
            future.cancel()
        self.ahead.clear()
        if self.process:
            self.process.stop()
            self.process, self.name = None, ""

    def _open(self, tap_ids: Sequence[int]) -> None:
        needed = engine_layer_ids(tap_ids, self.num_layers)
        if self.process and not set(needed) <= set(self.layer_ids):
            self.release()
        if self.config.python and not self.process:
            self.layer_ids = needed
            dtype = str(self.dtype).removeprefix("torch.")
            self.process = Process(self.config, self.model, dtype, needed)
            self.url = self.process.url
            self.process.wait()
        if not self.name:
            served = self._call("/v1/models", None, "")["data"][0]
            self.name = served["id"]
            log.info("states of %s from %s", served.get("root") or self.name, self.url)

    def _ask(self, ids: torch.Tensor) -> Answer:
        body = {
            "model": self.name,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 0.0,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
        }
        reply = self._call("/v1/completions", body, self._text(ids))
        path = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not path:
            raise ValueError(
                f"{self.url}: the reply names no file of hidden states: the server needs the method "
                "extract_hidden_states and a connector that writes files (docs/serving.md)"
            )
        file = Path(self.config.folder) / Path(path).name if self._elsewhere else Path(path)
        self._await(file)
        states = read_states(
            file, ids.tolist(), layer_ids=self.layer_ids, hidden_size=self.hidden_size, dtype=self.dtype
        )
        file.unlink()
        _lock(file).unlink(missing_ok=True)
        top = reply["choices"][0]["logprobs"]["top_logprobs"][0]
        return Answer(states, {int(key.removeprefix("token_id:")): value for key, value in top.items()})

    @property
    def _elsewhere(self) -> bool:
        return bool(self.config.url and self.config.folder)

    def _await(self, file: Path) -> None:
        """Wait until the file is there and nobody holds its lock (vLLM's own connector writes under one)."""
        end = time.monotonic() + FILE_S
        while not file.exists() or _locked(file):
            if self.process:
                self.process.check()
            if time.monotonic() > end:
                raise ValueError(
                    f"{file}: named by {self.url}, not there after {FILE_S:.0f} s: is the folder shared with "
                    "the server (target.server.folder) and its disk not full?"
                )
            time.sleep(POLL_S)

    def _call(self, path: str, body: dict[str, Any] | None, text: str) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_S) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            words = " ".join(error.read().decode(errors="replace").split())[:500]
            raise ValueError(f"{self.url}{path}{text}: HTTP {error.code}: {words}") from None
        except OSError as error:
            if self.process:
                self.process.check()
            raise ValueError(f"{self.url}{path}{text}: {error} (target.server.url)") from None

    def _text(self, ids: torch.Tensor) -> str:
        names = [s.id for s in self.samples if len(s.ids) == len(ids) and torch.equal(s.ids, ids.to(s.ids))]
        return f", sample {names[0]}" if names else f", a text of {len(ids)} tokens"


def _lock(file: Path) -> Path:
    return file.with_name(file.name + ".lock")


def _locked(file: Path) -> bool:
    if not _lock(file).exists():
        return False
    with open(_lock(file)) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def command(
    config: ServerConfig, model: str, dtype: str, layer_ids: Sequence[int], folder: Path
) -> list[str]:
    """The words that start a vLLM server which writes states at `layer_ids` into `folder`."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    transfer = {
        "kv_connector": "StatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": CONNECTOR.stem,
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    return [
        *(config.python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--dtype", dtype, "--host", "127.0.0.1", "--no-enable-prefix-caching"),
        *("--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer)),
        *config.arguments,
    ]


class Process:
    """A vLLM server of our own. Its files and its log lie in a folder that goes with it."""

    def __init__(self, config: ServerConfig, model: str, dtype: str, layer_ids: Sequence[int]):
        if shutil.which(config.python) is None:
            raise ValueError(f"target.server.python={config.python!r}: no such program")
        self.folder = Path(tempfile.mkdtemp(prefix="spectrain-states-", dir=config.folder or None))
        shutil.copy(CONNECTOR, self.folder)  # alone on the path: vLLM's environment is not ours
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = self.folder / "vllm.log"
        words = [*command(config, model, dtype, layer_ids, self.folder), "--port", str(port)]
        libc = ctypes.CDLL(None)
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                words,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": str(self.folder)},
                preexec_fn=lambda: libc.prctl(1, signal.SIGTERM),  # it must not outlive us (PR_SET_PDEATHSIG)
            )
        log.info("starting vLLM for %s on %s (layer ids %s)", model, self.url, list(layer_ids))

    def wait(self) -> None:
        """Until it answers, however long the weights take. Raises ValueError if it dies."""
        while True:
            self.check()
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)

    def check(self) -> None:
        """Raise ValueError with the errors of its log, which is kept, if it has died."""
        if (code := self.process.poll()) is None:
            return
        kept = self.folder.with_suffix(".log")
        if self.log.exists():
            self.log.rename(kept)
        lines = kept.read_text(errors="replace").splitlines()
        errors = dict.fromkeys(line for line in lines if ERROR.search(line))
        words = "\n".join(list(errors)[:5]) or "\n".join(lines[-5:])
        raise ValueError(f"the vLLM server ended with code {code} ({kept}):\n{words}")

    def stop(self) -> None:
        """End it and delete its folder."""
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder)

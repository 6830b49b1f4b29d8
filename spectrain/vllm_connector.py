"""A connector that runs inside vLLM and writes the hidden states of each request's prompt to a file.

vLLM's speculative method `extract_hidden_states` keeps the states at some layers in a cache of their own and
drafts nothing. When a request has finished, its rows are read from that cache and written to
FOLDER/REQUEST.safetensors under a temporary name, then renamed: a file that is there is whole. The copy is
synchronous and asks nothing of a device but a read, so it runs on CPU too. The reply names the file in
`kv_transfer_params.hidden_states_path`.

    hidden_states [T, A, D] at the ids of eagle_aux_hidden_state_layer_ids, ascending: id k is the residual
                  stream in front of layer k, so id n of n layers is the state before the final norm
    token_ids     int64 [T], the prompt
    metadata      layer_ids (JSON), num_layers

Imports vLLM, torch and safetensors alone: vLLM loads this one file by `kv_connector_module_path`, in an
environment without spectrain. Source: vLLM 0.32, kv_connector/v1/base.py. Legend: T tokens, A captured
layers, D hidden.
"""

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


@dataclass(frozen=True)
class Finished:
    """A request whose prompt has run. blocks: where its states are in the cache, in order."""

    request_id: str
    path: str
    token_ids: list[int]
    blocks: list[int]


@dataclass
class FinishedRequests(KVConnectorMetadata):
    """From the scheduler to the worker: what to write in this step."""

    requests: list[Finished] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Setting: kv_connector_extra_config {"folder": where to write}. Raises ValueError for a server that
    caches prefixes, whose rows would be missing, and for layer ids that do not ascend."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if vllm_config.cache_config.enable_prefix_caching:
            raise ValueError("StatesConnector: start vLLM with --no-enable-prefix-caching")
        speculative = vllm_config.speculative_config
        if speculative is None or speculative.method != "extract_hidden_states":
            raise ValueError("StatesConnector: --speculative-config needs method extract_hidden_states")
        self.layer_ids = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
        if self.layer_ids != sorted(set(self.layer_ids)):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids={self.layer_ids}: expected ascending ids")
        folder = vllm_config.kv_transfer_config.kv_connector_extra_config.get("folder")
        if not folder:
            raise ValueError('StatesConnector: kv_connector_extra_config needs {"folder": PATH}')
        self.folder = os.path.abspath(folder)
        os.makedirs(self.folder, exist_ok=True)
        self.num_layers = vllm_config.model_config.get_total_num_hidden_layers()
        groups = kv_cache_config.kv_cache_groups
        own = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
        if not own and len(groups) == 1:
            own = [0]  # one block table for states and keys, as of targets with latent attention
        if len(own) != 1:
            raise ValueError(f"StatesConnector: {len(own)} of {len(groups)} cache groups hold hidden states")
        self.group = own[0]
        self.block_size = groups[self.group].kv_cache_spec.block_size
        self.waiting: list[Finished] = []  # the scheduler's
        self.cache: torch.Tensor | None = None  # the writing worker's: [blocks, A, block_size, D]

    # The worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the cache of states; the first tensor-parallel rank of the last stage writes."""
        found = [cache for name, cache in kv_caches.items() if "cache_only_layers." in name]
        if not found or get_tensor_model_parallel_rank() != 0:
            return
        (cache,) = found
        if cache.ndim != 4 or cache.shape[1:3] != (len(self.layer_ids), self.block_size):
            raise ValueError(
                f"StatesConnector: a cache of shape {list(cache.shape)}, expected [blocks, "
                f"{len(self.layer_ids)}, {self.block_size}, hidden]: another version of vLLM?"
            )
        self.cache = cache

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Write what the scheduler named; then its blocks may be used again."""
        if self.cache is None or not self.has_connector_metadata():
            return None, None
        requests = self._get_connector_metadata().requests
        for request in requests:
            self._write(request)
        return {request.request_id for request in requests} or None, None

    def _write(self, request: Finished) -> None:
        assert self.cache is not None
        num_tokens = len(request.token_ids)
        needed = -(-num_tokens // self.block_size)
        if len(request.blocks) < needed:
            raise ValueError(
                f"request {request.request_id}: {len(request.blocks)} blocks for {num_tokens} tokens"
            )
        blocks = torch.tensor(request.blocks[:needed], device=self.cache.device)
        states_TAD = self.cache[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens].cpu().contiguous()
        tensors = {"hidden_states": states_TAD, "token_ids": torch.tensor(request.token_ids)}
        metadata = {"layer_ids": json.dumps(self.layer_ids), "num_layers": str(self.num_layers)}
        part = f"{request.path}.part"
        save_file(tensors, part, metadata)
        os.replace(part, request.path)

    def get_finished_count(self) -> int:
        """One rank reports a request, however many run it."""
        return 1

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The whole prompt is written at its end."""

    def wait_for_save(self) -> None:
        """The whole prompt is written at its end."""

    # The scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: Any) -> FinishedRequests:
        requests, self.waiting = self.waiting, []
        return FinishedRequests(requests)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict | None]:
        """Keep the blocks until they are written, unless the prompt has not run to its end."""
        ids = request.prompt_token_ids
        if not ids or request.num_computed_tokens < len(ids):
            return False, None
        path = os.path.join(self.folder, f"{request.request_id}.safetensors")
        self.waiting.append(Finished(request.request_id, path, list(ids), list(block_ids[self.group])))
        return True, {"hidden_states_path": path}

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict | None]:
        """The same, of an engine with one cache group."""
        return self.request_finished_all_groups(request, (block_ids,))

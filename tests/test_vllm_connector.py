"""The connector inside vLLM, on stand-ins for the few names of vLLM that it imports."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from spectrain.server import CONNECTOR
from spectrain.state_files import read_states

BLOCK, LAYER_IDS, HIDDEN = 4, [1, 3], 2


class HiddenStateCacheSpec:
    block_size = BLOCK


class Base:
    """Of vLLM's base class: the metadata that a step binds."""

    def __init__(self, *, vllm_config, role, kv_cache_config):
        self.metadata = None

    def has_connector_metadata(self):
        return self.metadata is not None

    def _get_connector_metadata(self):
        return self.metadata


@pytest.fixture
def connector(monkeypatch, tmp_path):
    """A function that makes a connector of a server with these settings; rank: tensor-parallel."""
    rank = SimpleNamespace(value=0)
    names = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorMetadata": type("KVConnectorMetadata", (), {}),
            "SupportsHMA": type("SupportsHMA", (), {}),
        },
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: rank.value},
        "vllm.v1.kv_cache_interface": {"HiddenStateCacheSpec": HiddenStateCacheSpec},
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("connector_alone", CONNECTOR)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "connector_alone", module)
    spec.loader.exec_module(module)

    def make(*, layer_ids=LAYER_IDS, prefix_caching=False, method="extract_hidden_states", folder="out"):
        draft = SimpleNamespace(hf_config=SimpleNamespace(eagle_aux_hidden_state_layer_ids=layer_ids))
        extra = {"folder": str(tmp_path / folder)} if folder else {}
        config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
            speculative_config=SimpleNamespace(method=method, draft_model_config=draft),
            kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 3),
        )
        specs = (SimpleNamespace(block_size=16), HiddenStateCacheSpec())
        groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        return module.StatesConnector(config, "worker", SimpleNamespace(kv_cache_groups=groups))

    make.rank = rank
    return make


def request(name, ids, computed=None):
    computed = len(ids) if computed is None else computed
    return SimpleNamespace(request_id=name, prompt_token_ids=ids, num_computed_tokens=computed)


def step(scheduler, worker):
    worker.metadata = scheduler.build_connector_meta(None)
    return worker.get_finished(set())


def filled_cache():
    """Row r of the cache holds r in channel 0 and the layer's column in channel 1."""
    cache = torch.zeros(8, len(LAYER_IDS), BLOCK, HIDDEN)
    cache[..., 0] = torch.arange(8 * BLOCK).view(8, 1, BLOCK)
    cache[..., 1] = torch.arange(len(LAYER_IDS))[None, :, None]
    return {"model.layers.0.self_attn": torch.zeros(1), "cache_only_layers.3": cache}


@pytest.mark.case("O-C05")
def test_each_request_is_written_from_its_own_blocks_in_order(connector, tmp_path):
    scheduler, worker = connector(), connector()
    worker.register_kv_caches(filled_cache())
    kept, reply = scheduler.request_finished_all_groups(request("b", [7, 8, 9, 10, 11]), ([1], [6, 2, 3]))
    assert kept and reply == {"hidden_states_path": str(tmp_path / "out" / "b.safetensors")}
    scheduler.request_finished_all_groups(request("a", [7, 8]), ([2], [5]))
    assert step(scheduler, worker) == ({"a", "b"}, None)
    settings = {"layer_ids": (), "hidden_size": HIDDEN, "dtype": torch.float32}
    found = read_states(tmp_path / "out" / "b.safetensors", [7, 8, 9, 10, 11], **settings)
    assert found.layer_ids == (1, 3)
    assert found.states[:, 0, 0].tolist() == [24.0, 25.0, 26.0, 27.0, 8.0]  # block 6, then block 2
    assert found.states[:, :, 1].tolist() == [[0.0, 1.0]] * 5
    other = read_states(tmp_path / "out" / "a.safetensors", [7, 8], **settings)
    assert other.states[:, 1, 0].tolist() == [20.0, 21.0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.safetensors", "b.safetensors"]


def test_a_request_is_written_once(connector):
    scheduler, worker = connector(), connector()
    worker.register_kv_caches(filled_cache())
    scheduler.request_finished_all_groups(request("a", [7]), ([0], [0]))
    assert step(scheduler, worker) == ({"a"}, None)
    assert step(scheduler, worker) == (None, None)


def test_a_request_stopped_within_its_prompt_keeps_nothing(connector):
    scheduler = connector()
    assert scheduler.request_finished_all_groups(request("a", [7, 8], computed=1), ((), ())) == (False, None)
    assert scheduler.build_connector_meta(None).requests == []


def test_only_the_first_rank_of_the_stage_with_the_cache_writes(connector, tmp_path):
    scheduler, second, other_stage = connector(), connector(), connector()
    connector.rank.value = 1
    second.register_kv_caches(filled_cache())
    connector.rank.value = 0
    other_stage.register_kv_caches({"model.layers.0.self_attn": torch.zeros(1)})
    scheduler.request_finished_all_groups(request("a", [7]), ([0], [0]))
    second.metadata = other_stage.metadata = scheduler.build_connector_meta(None)
    assert second.get_finished(set()) == other_stage.get_finished(set()) == (None, None)
    assert list((tmp_path / "out").iterdir()) == []
    assert scheduler.get_finished_count() == 1


@pytest.mark.case("O-C05")
def test_a_server_that_caches_prefixes_is_refused(connector):
    with pytest.raises(ValueError, match="--no-enable-prefix-caching"):
        connector(prefix_caching=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_ids": [3, 1]}, r"\[3, 1\]: expected ascending ids"),
        ({"method": "eagle3"}, "needs method extract_hidden_states"),
        ({"folder": ""}, 'needs {"folder": PATH}'),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message, connector):
    with pytest.raises(ValueError, match=message):
        connector(**settings)


def test_a_cache_of_another_form_is_refused(connector):
    with pytest.raises(ValueError, match=r"shape \[8, 4, 2, 2\], expected \[blocks, 2, 4, hidden\]"):
        connector().register_kv_caches({"cache_only_layers.3": torch.zeros(8, BLOCK, 2, HIDDEN)})


def test_too_few_blocks_are_refused(connector):
    scheduler, worker = connector(), connector()
    worker.register_kv_caches(filled_cache())
    scheduler.request_finished_all_groups(request("a", [1, 2, 3, 4, 5]), ([0], [0]))
    with pytest.raises(ValueError, match="request a: 1 blocks for 5 tokens"):
        step(scheduler, worker)

"""A target that another engine runs: the same features, the same fingerprint, and its faults by name."""

import fcntl
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, MambaConfig, MambaForCausalLM

from spectrain import server as module
from spectrain.artifacts import read_json
from spectrain.capture import capture, capture_batch
from spectrain.config import RunConfig, ServerConfig, TargetConfig
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.features import FeatureStore
from spectrain.skeleton import Checkpoint, final_norm
from spectrain.state_files import engine_layer_ids
from spectrain.target import load_target, packed_layout
from spectrain.testing import byte_tokenizer, make_sample, random_samples, tiny_llama

TAPS = (0, 2)


def save(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


class PatientServer(ThreadingHTTPServer):
    """Its socket keeps more than five callers waiting; the sixth would be reset."""

    request_queue_size = 128


class Engine:
    """A server with the replies and files of vLLM's, run by a target of ours. change(states [T, A, D]) spoils
    what it writes; reply(dict) what it says; named: whether files name their layers."""

    def __init__(self, target, folder, layer_ids):
        self.target, self.folder, self.layer_ids = target, folder, layer_ids
        self.change, self.reply, self.named = lambda states: states, lambda reply: reply, True
        self.prompts: list[list[int]] = []
        self.lock = threading.Lock()
        self.http = PatientServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def complete(self, body):
        ids = torch.tensor(body["prompt"])
        with self.lock:
            self.prompts.append(body["prompt"])
            number = len(self.prompts)
            layout = packed_layout((0, len(ids)))
            taps = [k - 1 for k in self.layer_ids]
            states = self.target.states(ids, torch.arange(len(ids)), layout, taps=taps)
        law = self.target.logits(states.final[-1:])[0].float().log_softmax(-1)
        path = self.folder / f"cmpl-{number}.safetensors"
        metadata = {"layer_ids": json.dumps(self.layer_ids)} if self.named else None
        self.write(path, {"hidden_states": self.change(states.taps), "token_ids": ids}, metadata)
        top = {f"token_id:{i}": law[i].item() for i in law.topk(body["logprobs"]).indices.tolist()}
        choice = {"logprobs": {"top_logprobs": [top]}}
        return self.reply({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}})

    def write(self, path, tensors, metadata):
        save_file(tensors, path, metadata)

    def _handler(engine):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, {"data": [{"id": "tiny", "root": "/models/tiny"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                reply = engine.complete(body)
                self.answer(400 if "error" in reply else 200, reply)

            def answer(self, code, content):
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(content).encode())

            def log_message(self, *args):
                pass

        return Handler


@pytest.fixture
def folder(tmp_path):
    return save(tiny_llama(), tmp_path / "model")


@pytest.fixture
def engine(folder, tmp_path):
    (tmp_path / "states").mkdir()
    target = load_target(TargetConfig(path=str(folder), dtype="float32"))
    engine = Engine(target, tmp_path / "states", engine_layer_ids(TAPS, 4))
    yield engine
    engine.http.shutdown()
    engine.http.server_close()


def served(model, dtype="float32", **server):
    return load_target(TargetConfig(path=str(model), dtype=dtype, server=ServerConfig(**server)))


def run_capture(target, samples, folder):
    return capture(target, samples, TAPS, folder, micro_tokens=80, progress=False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_served_target_has_the_fingerprint_of_the_whole_one_and_none_of_its_layers(tied, tmp_path):
    folder = save(tiny_llama(tied=tied), tmp_path)
    whole, ours = load_target(TargetConfig(path=str(folder))), served(folder, "bfloat16", url="http://host")
    assert ours.fingerprint() == whole.fingerprint()
    assert all(parameter.is_meta for parameter in ours.layers.parameters())
    assert torch.equal(ours.embedding.weight, whole.embedding.weight)
    assert torch.equal(ours.head.weight, whole.head.weight)
    assert (ours.head.weight is ours.embedding.weight) == tied
    assert ours.stop_ids() == whole.stop_ids()
    buffers = dict(whole.decoder.named_buffers())
    assert buffers and all(torch.equal(b, buffers[name]) for name, b in ours.decoder.named_buffers())


def test_another_layers_weights_give_another_fingerprint(folder, tmp_path):
    before = served(folder, url="http://host").fingerprint()
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.3.mlp.down_proj.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    after = served(folder, url="http://host").fingerprint()
    assert [key for key in before if before[key] != after[key]] == ["weights"]


def test_capture_from_a_server_fills_the_store_that_capture_in_process_fills(folder, engine, tmp_path):
    samples = random_samples(9)
    run_capture(engine.target, samples, tmp_path / "here")
    run_capture(served(folder, url=engine.url + "/v1"), samples, tmp_path / "there")
    here, there = (FeatureStore.load(tmp_path / name) for name in ("here", "there"))
    manifests = [read_json(tmp_path / name / "manifest.json") for name in ("here", "there")]
    for manifest in manifests:
        for shard in manifest["shards"]:
            shard.pop("sha256")
    assert manifests[0] == manifests[1]
    there.check(engine.target.fingerprint(), TAPS, samples)
    a, b = (store.batch(sorted(store.lengths)) for store in (here, there))
    for name in ("taps", "final", "lse"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-5, atol=1e-5)
    assert torch.equal(a.argmax, b.argmax)
    assert sorted(engine.prompts) == sorted(sample.ids.tolist() for sample in samples)  # each asked once
    assert list(engine.folder.iterdir()) == []


@pytest.mark.case("O-C05")
def test_a_texts_states_do_not_depend_on_what_is_asked_beside_it(folder, engine):
    target = served(folder, url=engine.url)
    a, b = make_sample("a", [1, 2, 3, 4, 5], "..SSS"), make_sample("b", [1, 2, 3, 9, 8, 7, 6, 5, 4], "." * 9)
    alone = {s.id: capture_batch(target, [s], TAPS).taps for s in (a, b)}
    assert alone["a"].shape == (5, 2, 32) and alone["b"].shape == (9, 2, 32)
    for row in ([a, b], [b, a], [a]):
        found = capture_batch(target, row, TAPS).taps
        torch.testing.assert_close(found, torch.cat([alone[s.id] for s in row]), rtol=0, atol=1e-5)


@pytest.mark.case("O-C02")
def test_a_server_of_another_final_state_is_refused_before_anything_is_written(folder, engine, tmp_path):
    engine.change = lambda states: torch.cat((states[:, :-1], states[:, -1:].flip(-1)), 1)
    with pytest.raises(ValueError, match=r"the server's log-probabilities differ by .* it serves another"):
        run_capture(served(folder, url=engine.url), random_samples(2), tmp_path / "features")
    assert not list((tmp_path / "features").glob("shard-*"))


@pytest.mark.case("O-C06")
def test_a_sample_with_non_finite_states_is_rejected_with_its_layer(folder, engine, tmp_path):
    samples = random_samples(120)
    bad = sorted(samples, key=lambda sample: sample.id)[3]

    def spoil(states):
        return (
            states * torch.tensor([1.0, torch.nan, 1.0])[:, None] if len(states) == len(bad.ids) else states
        )

    engine.change = spoil
    samples = [s for s in samples if s is bad or len(s.ids) != len(bad.ids)]
    target = served(folder, url=engine.url)
    manifest = capture(target, samples, TAPS, tmp_path / "features", micro_tokens=200, max_bad_fraction=0.5)
    assert manifest["rejected"] == [[bad.id, "2"]]


def test_what_the_server_refuses_is_told_with_the_sample(folder, engine, tmp_path):
    engine.reply = lambda reply: {"error": {"message": "longer than the model's 8 tokens"}}
    sample = random_samples(1)
    with pytest.raises(ValueError, match=f"sample {sample[0].id}: HTTP 400: .*longer than the model's 8"):
        run_capture(served(folder, url=engine.url), sample, tmp_path / "features")


def test_a_server_without_a_connector_is_refused(folder, engine):
    engine.reply = lambda reply: {**reply, "kv_transfer_params": None}
    with pytest.raises(ValueError, match="names no file of hidden states: the server needs the method"):
        capture_batch(served(folder, url=engine.url), [make_sample("a", [1, 2], ".S")], TAPS)


def test_a_server_that_is_not_there_is_named(folder):
    target = served(folder, url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"http://127.0.0.1:9/v1/models: .*\(target.server.url\)"):
        capture_batch(target, [make_sample("a", [1, 2], ".S")], TAPS)


def test_a_file_that_never_comes_is_named(folder, engine, monkeypatch):
    monkeypatch.setattr(module, "FILE_S", 0.05)
    engine.write = lambda path, tensors, metadata: None
    with pytest.raises(ValueError, match=r"cmpl-1.safetensors: named by .* is the folder shared"):
        capture_batch(served(folder, url=engine.url), [make_sample("a", [1, 2], ".S")], TAPS)


def test_a_folder_that_is_elsewhere_here_is_read_there(folder, engine, tmp_path):
    moved = engine.folder.rename(tmp_path / "mounted")
    engine.write = lambda path, tensors, metadata: save_file(tensors, moved / path.name, metadata)
    target = served(folder, url=engine.url, folder=str(moved))
    assert capture_batch(target, [make_sample("a", [1, 2], ".S")], TAPS).taps.shape == (2, 2, 32)


def test_a_file_under_its_writers_lock_is_waited_for(folder, engine):
    """vLLM's own connector replies first; it holds NAME.lock until the file is whole, and names no layers."""
    engine.named = False

    def write(path, tensors, metadata):
        lock = open(f"{path}.lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_bytes(b"half")

        def finish():
            time.sleep(0.1)
            save_file(tensors, path)
            lock.close()

        threading.Thread(target=finish).start()

    engine.write = write
    target = served(folder, url=engine.url, layer_ids=engine.layer_ids)
    assert capture_batch(target, [make_sample("a", [1, 2], ".S")], TAPS).taps.shape == (2, 2, 32)
    assert list(engine.folder.iterdir()) == []


def test_decoding_with_a_served_target_is_refused(folder, engine):
    with pytest.raises(ValueError, match="decoding needs the target in this process"):
        generate(
            served(folder, url=engine.url), [[1, 2, 3]], sampling=Sampling(temperature=0.0),
            max_new_tokens=2, stop_ids=(), drafter=None, plan=None, law="rejection", batch_size=1,
        )  # fmt: skip


def test_a_run_that_would_decode_with_a_server_is_refused_at_once():
    target = TargetConfig(server=ServerConfig(url="http://host"))
    with pytest.raises(ValueError, match=r"target.server: .* expected none of stages=\['eval'\]"):
        RunConfig(recipe="r", target=target)
    RunConfig(recipe="r", target=target, stages=["prepare", "capture", "train"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://a", "files": "b"}, "url and files given; expected one of url, python, files"),
        ({"url": "host:8000"}, "url='host:8000': expected http://HOST:PORT"),
        ({"url": "http://a", "arguments": ["-x"]}, r"arguments=\['-x'\]: no effect without .*python"),
        ({"python": "p", "layer_ids": [1]}, r"layer_ids=\[1\]: no effect without .*url or files"),
        ({"folder": "f"}, "folder='f': no effect without .*url or python"),
        ({"url": "http://a", "requests": 0}, "requests=0: expected at least 1"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match="target.server.*" + message):
        ServerConfig(**settings)


def test_a_python_that_is_not_there_is_named(folder):
    target = served(folder, python="/no/such/python")
    with pytest.raises(ValueError, match="target.server.python='/no/such/python': no such program"):
        capture_batch(target, [make_sample("a", [1, 2], ".S")], TAPS)


def test_a_server_that_dies_is_told_with_the_errors_of_its_log(folder, tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'MemoryError: 9 GiB'\nseq 99\nexit 3\n")
    program.chmod(0o755)
    target = served(folder, python=str(program), folder=str(tmp_path))
    with pytest.raises(ValueError, match=r"ended with code 3 \(.*\.log\):\nMemoryError: 9 GiB$"):
        capture_batch(target, [make_sample("a", [1, 2], ".S")], TAPS)
    target.release()
    assert [path.suffix for path in tmp_path.glob("spectrain-states-*")] == [".log"]


def test_the_command_names_the_taps_as_the_engine_counts_them():
    config = ServerConfig(python="py", arguments=["--tensor-parallel-size=8"])
    words = module.command(config, "m", "bfloat16", engine_layer_ids((1, 14, 26), 30), Path("/f"))
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    hf_config = speculative["draft_model_config"]["hf_config"]
    assert hf_config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27, 30]
    assert speculative["method"] == "extract_hidden_states"
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_module_path"] == "vllm_connector"
    assert transfer["kv_connector_extra_config"] == {"folder": "/f"}
    assert "--no-enable-prefix-caching" in words and words[-1] == "--tensor-parallel-size=8"


def test_capture_from_files_needs_no_server(folder, engine, tmp_path):
    samples = random_samples(4)
    target = served(folder, url=engine.url)
    files = tmp_path / "hs"
    files.mkdir()
    engine.write = lambda path, tensors, metadata: (
        save_file(tensors, files / path.name.replace("cmpl-", "hs_")),
        save_file(tensors, path, metadata),
    )
    run_capture(target, samples, tmp_path / "a")
    run_capture(served(folder, files=str(files), layer_ids=engine.layer_ids), samples, tmp_path / "b")
    a, b = (FeatureStore.load(tmp_path / name).batch([s.id for s in samples]) for name in ("a", "b"))
    assert torch.equal(a.taps, b.taps) and torch.equal(a.final, b.final) and torch.equal(a.lse, b.lse)


TEXT = dict(
    hidden_size=32, num_hidden_layers=6, vocab_size=100, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=64,
)  # fmt: skip


@pytest.mark.case("O-C03")
def test_the_embedding_is_found_under_every_common_name(tmp_path):
    tied = tiny_llama(tied=True, vocab=100)
    tied.save_pretrained(tmp_path / "single")
    tied.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    weight = tied.model.embed_tokens.weight.detach()
    prefixed = {f"language_model.{name}": tensor.clone() for name, tensor in tied.state_dict().items()}
    (tmp_path / "prefixed").mkdir()
    save_file(prefixed, tmp_path / "prefixed" / "model.safetensors")
    (tmp_path / "mamba").mkdir()
    save_file({"backbone.embeddings.weight": weight}, tmp_path / "mamba" / "model.safetensors")
    for name in ("single", "sharded", "prefixed"):
        assert torch.equal(Checkpoint(tmp_path / name).tensor("model.embed_tokens.weight"), weight)
    assert torch.equal(Checkpoint(tmp_path / "mamba").tensor("backbone.embeddings.weight"), weight)
    with pytest.raises(
        ValueError, match=r"no tensor 'model.embed_tokens.weight'.*backbone.embeddings.weight"
    ):
        Checkpoint(tmp_path / "mamba").tensor("model.embed_tokens.weight")
    with pytest.raises(ValueError, match="neither model.safetensors.index.json nor model.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.case("O-C03")
def test_a_nested_config_gives_the_text_models_skeleton(tmp_path):
    vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config = Gemma3Config(text_config=TEXT, vision_config={**vision, "image_size": 28, "patch_size": 14})
    folder = save(Gemma3ForConditionalGeneration(config), tmp_path)
    target = served(folder, url="http://host")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 100)
    whole = load_target(TargetConfig(path=str(folder), dtype="float32"))
    assert target.fingerprint() == whole.fingerprint()
    ids = torch.tensor([1, 5])
    assert torch.equal(target.embedding(ids), whole.embedding(ids))  # the scale included
    states = torch.randn(3, 32)
    assert torch.equal(target.norm(states), final_norm(whole.decoder, 32)(states))


def test_a_decoder_with_several_norms_beside_its_layers_is_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, state_size=2))
    assert final_norm(model.backbone, 4) is model.backbone.norm_f
    model.backbone.another = torch.nn.LayerNorm(4)
    with pytest.raises(ValueError, match="expected one final norm, found norm_f, another among embeddings"):
        final_norm(model.backbone, 4)

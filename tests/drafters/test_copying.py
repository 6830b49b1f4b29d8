"""The copying start: an untrained drafter says what followed the next token where it stood before."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from spectrain import checkpoint
from spectrain import train as loop
from spectrain.config import RunConfig, TrainConfig, WandbConfig
from spectrain.data.packing import pack
from spectrain.drafters import copying
from spectrain.drafters.eagle3 import Config, build
from spectrain.features import FeatureBatch
from spectrain.objectives import RowIndex
from spectrain.target import Target
from spectrain.testing import make_sample, random_samples, tiny_llama

V, D = 200, 256
KEPT = torch.arange(V)


@pytest.fixture(scope="module")
def target():
    return Target(tiny_llama(hidden=D, vocab=V, heads=4, kv_heads=2, tied=True))


def copier(target, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(Config(start="copying", unroll=2, **settings), target, KEPT)


def told(target, drafter, ids: list[int], name: str = "a") -> FeatureBatch:
    """A text whose first tap says its token and the one before it, by fixed maps, and whose other taps say
    nothing."""
    draw = torch.Generator().manual_seed(1)
    own, before = (torch.randn(D, D, generator=draw) / D**0.5 for _ in range(2))
    embedded = target.embedding.weight.float()
    embedded = embedded / embedded.pow(2).mean(1, keepdim=True).sqrt()
    tokens = pack([make_sample(name, ids, "." + "S" * (len(ids) - 1))])
    taps = torch.zeros(len(ids), len(drafter.taps), D)
    taps[:, 0] = embedded[ids] @ own
    taps[1:, 0] += 0.5 * embedded[ids[:-1]] @ before
    zeros = torch.zeros(len(ids))
    return FeatureBatch(tokens, drafter.taps, taps, torch.zeros(len(ids), D), zeros, zeros.long())


def random_texts(target, drafter, count: int, length: int = 60):
    draw = torch.Generator().manual_seed(2)
    for i in range(count):
        ids = torch.randint(0, V, (length,), generator=draw).tolist()
        yield told(target, drafter, ids, f"t{i}")


def guesses(drafter, batch: FeatureBatch) -> tuple[RowIndex, torch.Tensor]:
    rows = drafter.rows(batch)
    return rows.index, drafter.kept_ids[drafter.logits(rows.state).argmax(-1)]


@torch.no_grad()
def test_a_text_that_repeats_itself_is_continued_as_before(target):
    drafter = copier(target)
    drafter.start_from(random_texts(target, drafter, 60))
    once = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:20].tolist()
    index, guess = guesses(drafter, told(target, drafter, once * 2))
    second = (index.slot == 0) & (index.row >= 21)  # whose next token, and the one before it, came once
    wanted = torch.tensor(once * 2)[index.row[second] + 2]
    assert len(wanted) == 17
    assert int((guess[second] == wanted).sum()) >= 15
    plain = build(Config(unroll=2), target, KEPT)
    assert int((guesses(plain, told(target, plain, once * 2))[1][second] == wanted).sum()) <= 1


@torch.no_grad()
def test_of_two_places_the_one_with_the_same_token_before_is_copied(target):
    drafter = copier(target)
    drafter.start_from(random_texts(target, drafter, 60))
    right, total = 0, 0
    draw = torch.Generator().manual_seed(5)
    for _ in range(20):
        a, b, x, p, q, *rest = torch.randperm(V, generator=draw)[:20].tolist()
        ids = [*rest[:5], a, x, p, *rest[5:9], b, x, q, *rest[9:], a, x, 0]
        index, guess = guesses(drafter, told(target, drafter, ids))
        row = (index.slot == 0) & (index.row == len(ids) - 3)  # next token x, its own token a
        right += int(guess[row] == p)
        total += 1
    assert total == 20
    assert right >= 12


@torch.no_grad()
def test_the_maps_find_the_token_and_the_one_before_it_in_the_states(target):
    drafter = copier(target)
    states = copying._States(drafter)
    for batch in random_texts(target, drafter, 40):
        states.add(batch)
    assert states.count == 40 * 58
    said = told(target, drafter, torch.randperm(V, generator=torch.Generator().manual_seed(6))[:60].tolist())
    embedded = drafter.midlayer.input_layernorm(drafter.embed(KEPT)).float()
    for place, map_DD in enumerate(states.maps(torch.zeros(D))):
        found = drafter.fc_input(said.taps)[2:, :D] @ map_DD.T
        assert torch.equal((found @ embedded.T).argmax(1), said.tokens.ids[2 - place : 60 - place])


def test_no_more_text_is_read_than_the_maps_need(target):
    drafter = copier(target)
    read = []

    def endless():
        for i, batch in enumerate(random_texts(target, drafter, 10_000)):
            read.append(i)
            yield batch

    drafter.start_from(endless())
    assert len(read) == -(-copying.TOKENS * D // 58)


def test_the_same_random_state_gives_the_same_weights(target):
    weights = []
    for _ in range(2):
        drafter = copier(target)
        torch.manual_seed(7)
        drafter.start_from(random_texts(target, drafter, 3))
        weights.append({k: v.clone() for k, v in drafter.state_dict().items()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all(bool(value.isfinite().all()) for value in weights[0].values())


def test_the_slow_rows_are_those_of_the_copying_heads_and_their_channels(target):
    # 64 channels a head and base 10,000: pairs 12 to 31 turn by less than a quarter over 48 tokens; of their
    # 40 channels 12 are for the token before
    drafter = copier(target)
    assert drafter.slow_rows() == {
        "fc.weight": 52,
        "midlayer.self_attn.q_proj.weight": 128,
        "midlayer.self_attn.k_proj.weight": 64,
        "midlayer.self_attn.v_proj.weight": 64,
    }
    assert copying.marks(drafter).rotary.tolist() == [j for i in range(12, 32) for j in (i, i + 32)]
    assert build(Config(unroll=2), target, KEPT).slow_rows() == {}


@pytest.mark.parametrize("settings", [{"fc_norm": True}, {"norm_before_residual": True}, {"width": 384}])
def test_other_forms_start_too(target, settings):
    drafter = copier(target, **settings)
    drafter.start_from(random_texts(target, drafter, 3))
    assert all(bool(value.isfinite().all()) for value in drafter.state_dict().values())


def test_fewer_tokens_than_directions_leave_weights_of_ordinary_size(target):
    drafter = copier(target)
    drafter.start_from([told(target, drafter, list(range(90)))])
    largest = max(float(weight.abs().max()) for weight in drafter.state_dict().values())
    assert largest < 100


def test_a_text_of_too_few_tokens_is_refused(target):
    drafter = copier(target)
    message = "drafter.start=copying: the first pass has 3 different tokens .*; expected more than 68"
    with pytest.raises(ValueError, match=message):
        drafter.start_from([told(target, drafter, [1, 2, 3, 1, 2, 3, 1])])
    with pytest.raises(ValueError, match="has 0 different tokens"):
        drafter.start_from([])


def test_what_cannot_copy_is_refused():
    single = Target(tiny_llama(heads=4, kv_heads=1))
    with pytest.raises(ValueError, match="drafter.start=copying: needs a key/value head of its own"):
        build(Config(start="copying"), single, torch.arange(0, 260, 3))
    with pytest.raises(ValueError, match="drafter.start=copying: no effect with drafter.init_from='x'"):
        Config(start="copying", init_from="x")
    with pytest.raises(ValueError, match="drafter.start='fast': expected one of random, copying"):
        replace(Config(), start="fast")


def test_training_starts_once_from_the_first_pass_and_survives_a_stop(target, tmp_path, monkeypatch):
    config = RunConfig(
        recipe="test",
        device="cpu",
        drafter=Config(unroll=2, start="copying"),
        train=TrainConfig(
            batch_tokens=160, micro_tokens=80, passes=2, dtype="float32", save_every=2, features="online"
        ),
        wandb=WandbConfig(enabled=False),
    )
    starts = []

    def run(folder):
        drafter = checkpoint.build_drafter(config.drafter, target, KEPT)
        start = drafter.start_from
        monkeypatch.setattr(drafter, "start_from", lambda batches: starts.append(folder) or start(batches))
        samples = SimpleNamespace(train=random_samples(12, vocab=V))
        loop.train(config, target, samples, None, drafter, tmp_path / folder)
        return drafter.state_dict()

    def stop(self):
        if self.step == 3:
            raise KeyboardInterrupt
        return {}

    whole = run("whole")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop._Loop, "_scores", stop)
        run("stopped")
    resumed = run("stopped")
    assert starts == ["whole", "stopped"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    before = checkpoint.build_drafter(config.drafter, target, KEPT).state_dict()
    assert not torch.allclose(whole["fc.weight"], before["fc.weight"], atol=0.1)

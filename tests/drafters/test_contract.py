"""What every drafter family promises, each found in conf/drafter/: its rows, its losses and its training.

Families without parameters run the tests of proposals only (test_contract_proposals.py).
"""

from types import SimpleNamespace

import pytest
import torch

from spectrain import checkpoint
from spectrain.capture import capture_batch
from spectrain.config import TERMS, ObjectiveConfig, RunConfig, TrainConfig, WandbConfig
from spectrain.data.packing import pack
from spectrain.decode.engine import generate
from spectrain.decode.sampling import Sampling
from spectrain.objectives import Objective
from spectrain.optim import trainable
from spectrain.proposal import Plan
from spectrain.testing import make_sample, random_samples
from spectrain.testing_contract import (
    KEPT,
    TARGET,
    TRAINED,
    A,
    B,
    V,
    config_of,
    head_of,
    new_drafter,
    reach,
    text,
)
from spectrain.train import train

of_every_trained_family = pytest.mark.parametrize("family", TRAINED)


# Rows


def states_of(drafter, samples):
    """(sample id, position in the sample, slot) -> state."""
    batch = capture_batch(TARGET, samples, drafter.taps)
    with torch.no_grad():
        rows = drafter.rows(batch)
    tokens, index = batch.tokens, rows.index
    samples = [tokens.sample_ids[document] for document in tokens.document_ids[index.row].tolist()]
    places = zip(samples, tokens.positions[index.row].tolist(), index.slot.tolist(), strict=True)
    return dict(zip(places, rows.state, strict=True))


def assert_same(ours, theirs, *, sample_id=None):
    theirs = {key: state for key, state in theirs.items() if sample_id in (None, key[0])}
    assert ours.keys() == theirs.keys() and ours
    for key, state in ours.items():
        torch.testing.assert_close(state, theirs[key], atol=1e-5, rtol=0)


@pytest.mark.case("O-T08")
@of_every_trained_family
def test_documents_of_5_and_4_tokens_give_each_root_its_labels(family):
    """Token 0 of a document is no root: no row lies before it."""
    drafter = new_drafter(family, TARGET)
    tokens = pack([make_sample("a", [0] * 5, "SSSSS"), make_sample("b", [0] * 4, "SSSS")])
    assert tokens.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    index = drafter.index(tokens)
    assert torch.equal(index.source, index.row + 1 + index.slot)
    most = index.slots
    roots = [row + 1 for row in index.row.tolist()]
    assert [roots.count(n) for n in range(9)] == [min(n, most) for n in (0, 3, 2, 1, 0, 0, 2, 1, 0)]


@pytest.mark.case("O-T08")
@of_every_trained_family
def test_a_packed_document_has_the_states_that_it_has_alone(family):
    drafter = new_drafter(family, TARGET)
    assert_same(states_of(drafter, [B]), states_of(drafter, [A, B]), sample_id="b")


@pytest.mark.case("O-T08")
@of_every_trained_family
def test_the_tokens_of_another_document_change_no_state(family):
    drafter = new_drafter(family, TARGET)
    other = make_sample("a", text(13, 3), "...SSSSSS.TTT")
    first, second = (states_of(drafter, [x, B]) for x in (A, other))
    assert all(torch.equal(state, second[key]) for key, state in first.items() if key[0] == "b")


@of_every_trained_family
def test_the_order_of_documents_changes_no_state(family):
    drafter = new_drafter(family, TARGET)
    assert_same(states_of(drafter, [A, B]), states_of(drafter, [B, A]))


# Losses


def dense_loss(drafter, batch, terms, decay):
    """The loss written out row by row in float64, from the rows' states on."""
    rows = drafter.rows(batch)
    index, kept = rows.index, drafter.kept_ids.tolist()
    lost = {(term, k): [] for term in terms for k in range(index.slots)}
    for state, slot, source in zip(rows.state, index.slot.tolist(), index.source.tolist(), strict=True):
        log_q = torch.log_softmax(head_of(drafter, slot).double() @ state.double(), -1)
        full = torch.softmax(TARGET.head.weight.double() @ batch.final[source].double(), -1)
        p, label = full[drafter.kept_ids], int(batch.tokens.ids[source + 1])
        if int(full.argmax()) in kept:
            renormalised = p / p.sum()
            lost["kl", slot].append((renormalised * (renormalised.log() - log_q)).sum())
        if label in kept:
            lost["ce", slot].append(-log_q[kept.index(label)])
        lost["tv", slot].append(1 - torch.minimum(p, log_q.exp()).sum())
    return sum(
        terms[term] * decay**slot * torch.stack(values).mean()
        for (term, slot), values in lost.items()
        if values
    )


@of_every_trained_family
def test_the_loss_and_its_gradients_equal_a_dense_reference(family):
    drafter = new_drafter(family, TARGET)
    terms = {"kl": 1.0, "ce": 0.5, "tv": 0.3}
    batch = capture_batch(TARGET, random_samples(3, vocab=V), drafter.taps)
    objective = Objective(ObjectiveConfig(terms=terms, slot_decay=0.7), drafter, TARGET)
    counts = objective.count(drafter.index(batch.tokens), batch)
    result = objective.loss(drafter.rows(batch), batch, drafter.head_weight(), counts)
    expected = dense_loss(drafter, batch, terms, decay=0.7)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    parameters = trainable(drafter)
    ours, theirs = (
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for loss in (result.loss, expected)
    )
    for name, one, other in zip(parameters, ours, theirs, strict=True):
        assert one is not None and other is not None, name
        assert (one - other).abs().max() <= 1e-4 * other.abs().max(), name


@pytest.mark.parametrize(
    ("config", "key"),
    [(ObjectiveConfig(terms={term: 1.0}), f"objective.terms.{term}") for term in TERMS]
    + [(ObjectiveConfig(dpace=0.5), "objective.dpace")],
    ids=[*TERMS, "dpace"],
)
@of_every_trained_family
def test_every_objective_trains_the_family_or_is_refused_by_name(family, config, key):
    drafter = new_drafter(family, TARGET)
    batch = capture_batch(TARGET, [A, B], drafter.taps)
    try:
        objective = Objective(config, drafter, TARGET)
    except ValueError as refusal:
        assert str(refusal).startswith(key) and drafter.config.family in str(refusal)
        return
    counts = objective.count(drafter.index(batch.tokens), batch)
    result = objective.loss(drafter.rows(batch), batch, drafter.head_weight(), counts)
    result.loss.backward()
    grads = [parameter.grad for parameter in trainable(drafter).values()]
    assert result.loss.isfinite() and result.loss > 0
    assert all(grad.isfinite().all() for grad in grads) and any(grad.abs().max() > 0 for grad in grads)


@of_every_trained_family
def test_a_batch_that_supervises_nothing_gives_gradients_of_zero(family):
    drafter = new_drafter(family, TARGET)
    batch = capture_batch(TARGET, [make_sample("a", text(6, 1), "..S...")], drafter.taps)
    objective = Objective(ObjectiveConfig(), drafter, TARGET)
    rows = drafter.rows(batch)
    assert not len(rows.index.row)
    counts = objective.count(rows.index, batch)
    objective.loss(rows, batch, drafter.head_weight(), counts).loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in trainable(drafter).values())


@pytest.mark.case("O-T10")
@of_every_trained_family
def test_the_target_receives_no_gradient(family):
    drafter = new_drafter(family, TARGET)
    batch = capture_batch(TARGET, [A], drafter.taps)
    TARGET.head.weight.requires_grad_(True)
    try:
        objective = Objective(ObjectiveConfig(), drafter, TARGET)
        counts = objective.count(drafter.index(batch.tokens), batch)
        objective.loss(drafter.rows(batch), batch, drafter.head_weight(), counts).loss.backward()
    finally:
        TARGET.head.weight.requires_grad_(False)
    assert all(parameter.grad is None for parameter in TARGET.model.parameters())


# Training


def run_config(family, **settings):
    fixed = {"dtype": "float32", "features": "online", "batch_tokens": 80, "micro_tokens": 80}
    return RunConfig(
        recipe="contract",
        device="cpu",
        drafter=config_of(family),
        objective=ObjectiveConfig(terms={"ce": 1.0}),
        train=TrainConfig(**fixed | settings),
        wandb=WandbConfig(enabled=False),
    )


@of_every_trained_family
def test_a_conversation_learnt_by_heart_is_drafted(family, tmp_path):
    """Its reply is the target's own greedy text; of the draft tokens at least 95% are accepted."""
    prompt, length = list(range(20, 32)), 32
    call = {"sampling": Sampling(), "max_new_tokens": length, "stop_ids": [], "batch_size": 1}
    plain, _ = generate(TARGET, [prompt], **call)
    reply = list(plain[0].ids)
    assert len(set(reply)) > length // 3  # a text, not a loop
    sample = make_sample("a", prompt + reply, "." * len(prompt) + "S" * length)
    config = run_config(family, passes=STEPS, learning_rate=1e-2, clip=1.0, save_every=STEPS)
    drafter = checkpoint.build_drafter(config.drafter, TARGET, torch.arange(V))
    result = train(config, TARGET, SimpleNamespace(train=[sample]), None, drafter, tmp_path)
    assert result.step == STEPS <= 300
    plan = Plan("chain", min(4, reach(drafter)))
    found, _ = generate(TARGET, [prompt], **call, drafter=drafter.eval(), plan=plan)
    assert list(found[0].ids) == reply
    drafted = sum(r.drafted for r in found[0].rounds)
    accepted = sum(r.accepted for r in found[0].rounds)
    assert drafted >= length // 2 - 1  # one a round at least; the prompt's own call gives the first token
    assert accepted >= 0.95 * drafted


STEPS = 120


class Stop(Exception):
    pass


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@of_every_trained_family
def test_stop_and_resume_equal_the_uninterrupted_run_bit_for_bit(family, tmp_path):
    samples = random_samples(4, vocab=V)

    def run(folder, stop_at):
        def scores(drafter):
            if len(checkpoint.complete(folder)) == stop_at:
                raise Stop
            return {"tau": 1.0}

        config = run_config(family, max_steps=3, save_every=1, keep=3, eval_every=1)
        drafter = checkpoint.build_drafter(config.drafter, TARGET, KEPT)
        train(config, TARGET, SimpleNamespace(train=samples), None, drafter, folder, scores)

    run(tmp_path / "whole", None)
    with pytest.raises(Stop):
        run(tmp_path / "stopped", 1)
    run(tmp_path / "stopped", None)
    whole, stopped = (checkpoint.latest(tmp_path / name) for name in ("whole", "stopped"))
    assert contents(stopped) == contents(whole)

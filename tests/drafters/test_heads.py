"""Medusa and Hydra: what a head reads, where it starts, and what is drafted from all heads at once."""

import pytest
import torch

from spectrain.capture import capture_batch
from spectrain.config import TrainConfig
from spectrain.data.packing import pack
from spectrain.drafters import hydra, medusa
from spectrain.optim import build_optimizer, trainable
from spectrain.proposal import Observation, Plan
from spectrain.target import Target
from spectrain.testing import make_sample, tiny_llama

V, D = 96, 32
KEPT = torch.arange(0, V, 3)
TARGET = Target(tiny_llama(vocab=V))
FAMILIES = pytest.mark.parametrize("family", [medusa, hydra], ids=["medusa", "hydra"])


class Chosen:
    """The greedy sampler."""

    greedy, penalised = True, False

    def best(self, logits):
        return logits.argmax(-1)


def random(family, **settings):
    drafter = family.build(family.Config(**{"heads": 3} | settings), TARGET, KEPT)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return drafter


def text(length, seed=5):
    return torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafting_at(drafter, final, root):
    """At work on one request whose newest row has the state `final` and the root x_1 = `root`."""
    drafting = drafter.start(1, 40)
    drafting.observe([Observation(0, 0, torch.tensor([root]), torch.empty(1, 0, D), final[None])])
    return drafting


@pytest.mark.case("O-T01")
@FAMILIES
def test_a_row_counts_iff_its_root_and_its_label_lie_in_the_span(family):
    index = random(family, heads=3).index(pack([make_sample("a", [0] * 8, "...SSS..")]))
    found = list(zip(index.row.tolist(), index.slot.tolist(), index.source.tolist(), strict=True))
    assert found == [(2, 0, 3), (3, 0, 4), (2, 1, 4)]


@FAMILIES
@pytest.mark.parametrize("head", ["trained", "frozen"])
@pytest.mark.parametrize("blocks", [1, 3])
def test_an_untrained_head_says_what_the_targets_head_says(family, head, blocks):
    drafter = family.build(family.Config(heads=2, head=head, blocks=blocks), TARGET, KEPT)
    batch = capture_batch(TARGET, [make_sample("a", text(9), "." + "S" * 8)], ())
    rows = drafter.rows(batch)
    assert torch.equal(rows.state, batch.final[rows.index.row])
    heads = drafter.head_weight()
    for weight in [heads] if head == "frozen" else heads:
        assert torch.equal(weight, TARGET.head.weight[KEPT])


@FAMILIES
def test_a_frozen_head_is_no_trained_tensor_and_own_heads_are_apart(family):
    frozen, own = random(family, head="frozen"), random(family)
    assert not [name for name in frozen.state_dict() if "head" in name]
    assert not frozen.head_weight().requires_grad
    assert [name for name in own.state_dict() if "head" in name] == [f"lm_heads.{k}.weight" for k in range(3)]
    assert len({weight.data_ptr() for weight in own.head_weight()}) == 3


@FAMILIES
def test_blocks_of_a_head_have_weights_of_their_own(family):
    first, second = random(family, blocks=2).blocks[0].layers
    assert first is not second and first.weight.data_ptr() != second.weight.data_ptr()


def test_medusas_tensors_have_the_names_and_shapes_that_vllm_reads():
    drafter = random(medusa, heads=2, blocks=2)
    expected = {f"lm_heads.{k}.weight": (len(KEPT), D) for k in range(2)}
    for k in range(2):
        for j in range(2):
            expected |= {f"blocks.{k}.layers.{j}.weight": (D, D), f"blocks.{k}.layers.{j}.bias": (D,)}
    assert {name: tuple(t.shape) for name, t in drafter.state_dict().items()} == expected
    assert drafter.export_tensors("vllm").keys() == expected.keys()


def silu(x):
    return x / (1 + (-x).exp())


def test_medusas_head_is_x_plus_silu_of_w_x_plus_b_twice():
    drafter = random(medusa, blocks=2)
    x = final = torch.randn(4, D)
    w = drafter.state_dict()
    for j in range(2):
        x = x + silu(x @ w[f"blocks.1.layers.{j}.weight"].T + w[f"blocks.1.layers.{j}.bias"])
    expected = x @ w["lm_heads.1.weight"].T
    torch.testing.assert_close(drafter.logits(final, 3)[1], expected, atol=1e-5, rtol=0)


def test_hydras_head_reads_the_state_then_the_root_then_the_draft_tokens():
    drafter, ids = random(hydra, blocks=2), text(9)
    batch = capture_batch(TARGET, [make_sample("a", ids, "." + "S" * 8)], ())
    rows = drafter.rows(batch)
    w = drafter.state_dict()
    for row, slot, state in zip(rows.index.row.tolist(), rows.index.slot.tolist(), rows.state, strict=True):
        seen = [TARGET.embedding.weight[token] for token in ids[row + 1 : row + 2 + slot]]
        x = torch.cat((batch.final[row], *seen))
        name = f"blocks.{slot}"
        x = w[f"{name}.skip.weight"] @ x + silu(w[f"{name}.layers.0.weight"] @ x + w[f"{name}.layers.0.bias"])
        x = x + silu(w[f"{name}.layers.1.weight"] @ x + w[f"{name}.layers.1.bias"])
        torch.testing.assert_close(state, x, atol=1e-5, rtol=0)


def test_medusas_static_tree_is_a_product_of_ranks_from_one_call():
    drafter, final = random(medusa), torch.randn(D)
    best = KEPT[drafter.logits(final[None], 3)[:, 0].argsort(-1, descending=True)].tolist()
    drafting = drafting_at(drafter, final, root=7)
    paths = ((0,), (1,), (4,), (0, 2), (1, 0), (4, 3), (1, 0, 5))
    (tree,) = drafting.propose([0], Plan("static", 3, paths=paths), Chosen())
    ranked = [[best[depth][rank] for depth, rank in enumerate(path)] for path in paths]
    assert [tree.path(node) for node in range(7)] == ranked
    assert tree.parents == (-1, -1, -1, 0, 1, 2, 4) and drafting.steps == 1


def test_medusas_dynamic_tree_keeps_the_likeliest_products():
    drafter, final = random(medusa), torch.randn(D)
    logq = drafter.logits(final[None], 2)[:, 0].log_softmax(-1)
    scores = {(int(KEPT[a]),): logq[0, a].item() for a in logq[0].topk(4).indices}
    for a in logq[0].topk(4).indices:
        for b in logq[1].topk(4).indices:
            scores[int(KEPT[a]), int(KEPT[b])] = (logq[0, a] + logq[1, b]).item()
    expected = sorted(scores, key=lambda path: -scores[path])[:8]
    (tree,) = drafting_at(drafter, final, root=7).propose([0], Plan("tree", 2, nodes=8, top_k=4), Chosen())
    assert {tuple(tree.path(node)) for node in range(8)} == set(expected)


def test_hydra_runs_one_head_a_step_and_each_node_sees_its_own_path():
    drafter, final = random(hydra), torch.randn(D)

    def best(*seen):
        state = drafter.state(len(seen) - 1, final[None], torch.tensor([seen]))
        return KEPT[(state @ drafter.head_weight()[len(seen) - 1].T)[0].argsort(descending=True)].tolist()

    drafting = drafting_at(drafter, final, root=7)
    paths = ((0,), (1,), (0, 0), (1, 0), (1, 0, 0))
    (tree,) = drafting.propose([0], Plan("static", 3, paths=paths), Chosen())
    a, b = best(7)[:2]
    c, d = best(7, a)[0], best(7, b)[0]
    assert [tree.path(node) for node in range(5)] == [[a], [b], [a, c], [b, d], [b, d, best(7, b, d)[0]]]
    assert drafting.steps == 3


@FAMILIES
@pytest.mark.parametrize(
    "plan", [Plan("chain", 4), Plan("static", 4, paths=((0,), (0, 0), (0,) * 3, (0,) * 4))]
)
def test_a_draft_deeper_than_the_heads_is_refused(family, plan):
    drafting = drafting_at(random(family), torch.randn(D), root=7)
    with pytest.raises(ValueError, match=r"length 4: the drafter has 3 heads \(drafter.heads\).*at most 3"):
        drafting.propose([0], plan, Chosen())


@FAMILIES
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 0}, "drafter.heads=0: expected at least 1"),
        ({"blocks": 0}, "drafter.blocks=0: expected at least 1"),
        ({"head": "thawed"}, "drafter.head='thawed': expected one of trained, frozen"),
    ],
)
def test_settings_out_of_range_are_refused_with_key_and_value(family, settings, message):
    with pytest.raises(ValueError, match=message):
        family.Config(**settings)


def test_hydra_which_no_engine_loads_refuses_its_export():
    with pytest.raises(ValueError, match="export.engine=vllm: no export of hydra: it has no Hydra"):
        random(hydra).engine_config(TARGET, "vllm")


def test_medusas_trained_heads_over_a_reduced_vocabulary_refuse_their_export():
    with pytest.raises(ValueError, match="expected 0 for the export of Medusa"):
        random(medusa).engine_config(TARGET, "vllm")


@FAMILIES
def test_muon_turns_the_blocks_and_leaves_the_heads_to_adamw(family):
    drafter = random(family)
    adamw, muon = build_optimizer(drafter, TrainConfig(optimizer="muon")).parts
    turned = {id(p) for group in muon.param_groups for p in group["params"]}
    names = {name for name, p in trainable(drafter).items() if id(p) in turned}
    assert names == {n for n in drafter.state_dict() if n.startswith("blocks") and not n.endswith("bias")}

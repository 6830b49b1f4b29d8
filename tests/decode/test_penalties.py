"""Penalties and filters: the laws of transformers' generate, counted along each node's own path."""

import pytest
import torch
from transformers import (
    GenerationConfig,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spectrain.decode.engine import generate
from spectrain.decode.penalties import History, Penalties, along_text
from spectrain.decode.sampling import Sampling, law
from spectrain.proposal import Proposal
from spectrain.target import Target
from spectrain.testing import tiny_llama

CPU = torch.device("cpu")
ALL = Sampling(temperature=0.7, top_k=12, top_p=0.9, min_p=0.1, repetition_penalty=1.3)


def test_the_example_of_the_docstring():
    history = History(Penalties(repetition=2.0, presence=0.5, frequency=0.25), 1, 4, CPU)
    history.begin(0, [0, 1])
    history.extend([0], [[1, 2]])
    found = history.penalise(torch.tensor([[4.0, -1.0, 3.0, 1.0]]), [0], [[2]])
    assert found.tolist() == [[2.0, -2.75, 0.5, 1.0]]


def test_presence_and_frequency_do_not_count_the_prompt():
    history = History(Penalties(repetition=1.0, presence=1.0, frequency=0.5), 1, 3, CPU)
    history.begin(0, [0, 0, 1])
    assert history.penalise(torch.zeros(1, 3), [0], [[]]).tolist() == [[0.0, 0.0, 0.0]]
    assert history.penalise(torch.zeros(1, 3), [0], [[1, 1]]).tolist() == [[0.0, -2.0, 0.0]]


def test_nodes_of_one_depth_have_penalties_of_their_own():
    tree = Proposal(torch.tensor([0, 1, 2, 1]), (-1, -1, 0, 1))
    assert [tree.path(node) for node in (-1, 2, 3)] == [[], [0, 2], [1, 1]]
    history = History(Penalties(repetition=1.0, presence=0.0, frequency=1.0), 1, 3, CPU)
    found = history.penalise(torch.zeros(2, 3), [0, 0], [tree.path(2), tree.path(3)])
    assert found.tolist() == [[-1.0, 0.0, -1.0], [0.0, -2.0, 0.0]]
    assert history.penalise(torch.zeros(1, 3), [0], [[]]).tolist() == [
        [0.0, 0.0, 0.0]
    ]  # paths leave no trace


def test_a_new_request_forgets_the_one_before_it():
    history = History(Penalties(repetition=2.0, presence=1.0, frequency=0.0), 2, 3, CPU)
    history.begin(0, [0])
    history.begin(1, [1])
    history.extend([0, 1], [[2], [2]])
    history.begin(0, [1])
    found = history.penalise(torch.ones(2, 3), [0, 1], [[], []])
    assert found.tolist() == [[1.0, 0.5, 1.0], [1.0, 0.5, -0.5]]


def test_columns_of_a_draft_vocabulary_are_penalised_by_their_target_ids():
    history = History(Penalties(repetition=4.0, presence=0.0, frequency=0.0), 1, 9, CPU)
    history.begin(0, [3])
    found = history.penalise(torch.full((1, 3), 8.0), [0], [[7]], torch.tensor([1, 3, 7]))
    assert found.tolist() == [[8.0, 2.0, 2.0]]


def test_prompt_tokens_beyond_the_head_and_forbidden_tokens_are_left_alone():
    history = History(Penalties(repetition=2.0, presence=1.0, frequency=1.0), 1, 2, CPU)
    history.begin(0, [0, 5])
    assert history.penalise(torch.tensor([[-torch.inf, 1.0]]), [0], [[0]]).tolist() == [[-torch.inf, 1.0]]


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_equals_transformers_bit_for_bit(penalty):
    logits = 3 * torch.randn(5, 40)
    prompt, ids = [3, 3, 17, 39], [8, 3, 0, 8, 21, 5]
    found = along_text(logits, prompt, ids, 1, Penalties(penalty, 0.0, 0.0))
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for i in range(5):
        text = torch.tensor([prompt + ids[: 1 + i]])
        assert torch.equal(found[i : i + 1], processor(text, logits[i : i + 1].clone()))


@pytest.mark.case("O-X03")
def test_every_filter_together_equals_the_processors_of_transformers_bit_for_bit():
    logits = 3 * torch.randn(8, 60)
    text = torch.randint(60, (8, 30))
    scores = RepetitionPenaltyLogitsProcessor(1.3)(text, logits.clone())
    scores = TemperatureLogitsWarper(0.7)(text, scores)
    for warper in (TopKLogitsWarper(12), TopPLogitsWarper(0.9), MinPLogitsWarper(0.1)):
        scores = warper(text, scores)
    history = History(ALL.penalties, 8, 60, CPU)
    for row in range(8):
        history.begin(row, text[row, :10].tolist())
    history.extend(range(8), text[:, 10:25].tolist())
    found = ALL.law(history.penalise(logits, range(8), text[:, 25:].tolist()))
    assert torch.equal(found, torch.softmax(scores, -1))
    assert 1 < (found > 0).sum(-1).float().mean() < 12


@pytest.mark.case("O-X03")
def test_the_law_is_that_of_transformers_generate_at_every_step():
    model = tiny_llama(layers=2, vocab=64)
    settings = GenerationConfig(
        do_sample=True, max_new_tokens=12, temperature=0.7, top_k=12, top_p=0.9, min_p=0.1,
        repetition_penalty=1.3, output_scores=True, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([[5, 9, 13, 5]]), generation_config=settings)
    logits, scores = torch.cat(out.logits), torch.cat(out.scores)
    prompt, ids = [5, 9, 13, 5], out.sequences[0, 4:].tolist()
    found = ALL.law(along_text(logits, prompt, ids, 0, ALL.penalties))
    assert len(found) == 12 and torch.equal(found, torch.softmax(scores, -1))


def test_greedy_text_with_a_repetition_penalty_is_that_of_transformers_generate():
    model = tiny_llama(layers=2, vocab=64)
    settings = GenerationConfig(do_sample=False, max_new_tokens=16, repetition_penalty=1.5)
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([[5, 9, 13, 5]]), generation_config=settings)[0, 4:].tolist()
    plain, penalised = (
        generate(
            Target(tiny_llama(layers=2, vocab=64)),
            [[5, 9, 13, 5]],
            sampling=Sampling(repetition_penalty=penalty),
            max_new_tokens=16,
            stop_ids=(),
            batch_size=1,
        )[0][0]
        for penalty in (1.0, 1.5)
    )
    assert list(penalised.ids) == expected != list(plain.ids)


def test_min_p_is_a_share_of_the_largest_probability_after_top_k():
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    assert law(p.log(), temperature=1.0, min_p=0.4).tolist()[0] == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert law(p.log(), temperature=1.0, min_p=0.2).tolist()[0] == pytest.approx(p[0].tolist())
    assert law(p.log(), temperature=1.0, min_p=1.0).tolist() == [[1, 0, 0, 0]]
    # Before the temperature 0.125 would fall below 0.4 of 0.5; squared roots it does not.
    assert (law(p.log(), temperature=2.0, min_p=0.4) > 0).all()


def test_ties_at_the_edge_of_top_p_go_to_the_lowest_ids():
    assert law(torch.zeros(1, 4), temperature=1.0, top_p=0.5).tolist() == [[0.5, 0.5, 0, 0]]


def test_settings_without_penalties_keep_no_history():
    assert Sampling(temperature=1.0, top_p=0.9, min_p=0.1).penalties is None
    assert Sampling(presence_penalty=-0.5).penalties == Penalties(1.0, -0.5, 0.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"min_p": 1.5}, r"sampling.min_p=1.5: expected 0.0 to 1.0"),
        ({"repetition_penalty": 0.0}, r"sampling.repetition_penalty=0.0: expected above 0"),
        ({"presence_penalty": 2.5}, r"sampling.presence_penalty=2.5: expected -2.0 to 2.0"),
        ({"frequency_penalty": -3.0}, r"sampling.frequency_penalty=-3.0: expected -2.0 to 2.0"),
    ],
)
def test_settings_outside_their_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**setting)

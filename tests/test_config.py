"""Words to typed settings: what a recipe means, and the exact line for each kind of mistake."""

import pytest

from spectrain.compose import compose, convert, families, recipe_names
from spectrain.config import TERMS, EvalConfig, RunConfig, TrainConfig
from spectrain.decode_settings import DecodeRunConfig
from spectrain.laws import Leniency


def quickstart(*words):
    return compose(["recipe=quickstart", *words])


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_composes_under_its_own_name(name):
    assert compose([f"recipe={name}", "corpus.path=mine.jsonl"]).recipe == name


def test_a_recipe_is_a_diff_over_the_dataclasses():
    assert quickstart().train.betas == TrainConfig().betas


def test_command_line_wins_over_recipe():
    assert quickstart("train.passes=9").train.passes == 9.0


def test_engine_and_path_are_short_for_those_of_the_export():
    found = compose(
        ["recipe=quickstart", "stages=check_export", "engine=vllm,sglang", "path=/a b/(c)"]
    ).export
    assert (found.engine, found.path) == (["vllm", "sglang"], "/a b/(c)")


def test_an_engine_that_is_not_known_is_refused_with_its_key():
    with pytest.raises(ValueError, match="export.engine='tgi': expected one of vllm, sglang"):
        compose(["recipe=quickstart", "engine=tgi"])


def test_target_is_short_for_its_path_and_takes_any_character():
    assert quickstart("target=/models/my (new) model, v=2").target.path == "/models/my (new) model, v=2"


def test_one_stage_needs_no_brackets():
    assert quickstart("stages=train").stages == ["train"]
    assert quickstart("stages=[train,eval]").stages == ["train", "eval"]


def test_a_dict_replaces_the_default_and_does_not_add_to_it():
    assert quickstart("objective.terms={ce: 1}").objective.terms == {"ce": 1.0}


def test_drafter_becomes_the_config_of_its_family():
    config = quickstart("drafter.unroll=3").drafter
    assert (type(config).__module__, config.unroll) == ("spectrain.drafters.eagle3", 3)


def test_one_entry_of_a_list_can_be_changed():
    assert quickstart("eval.runs.0.dtype=float32").eval.runs[0].dtype == "float32"


def test_a_run_is_changed_by_its_name_as_by_its_index():
    assert quickstart("eval.runs.chain5_t0.dtype=float32").eval.runs[0].dtype == "float32"


def test_a_recipe_may_be_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\ntrain: {passes: 3}\n")
    config = compose([f"recipe={tmp_path}/mine.yaml"])
    assert (config.recipe, config.train.passes, [run.name for run in config.eval.runs][:1]) == (
        "mine",
        3.0,
        ["chain5_t0"],
    )


def test_a_recipe_that_is_not_yaml_is_named(tmp_path):
    (tmp_path / "bad.yaml").write_text("train: {passes: [3}\n")
    with pytest.raises(ValueError, match="^recipe=bad: not YAML: .*line 1"):
        compose([f"recipe={tmp_path}/bad.yaml"])


KNOWN = ", ".join(recipe_names())
FAMILIES = ", ".join(families())
KEYS = ", ".join(RunConfig.__annotations__)
STAGE_NAMES = (
    "prepare, capture, train, eval, export, report, regenerate, doctor, serve_check, compare, check_export"
)


@pytest.mark.parametrize(
    "words, message",
    [
        ([], f"recipe=NAME is missing; known recipes: {KNOWN}"),
        (["recipe=quick"], f"recipe=quick: unknown; known recipes: {KNOWN}"),
        (["recipe=no/such.yaml"], f"recipe=no/such.yaml: no such file; known recipes: {KNOWN}"),
        (["recipe=eagle3_llama"], "corpus.path: recipe eagle3_llama needs it: corpus.path=VALUE"),
        (["recipe=quickstart", "fast"], "'fast': expected key=value (python -m spectrain --help)"),
        (
            ["recipe=quickstart", "train.learningrate=1"],
            "train.learningrate: no such key; did you mean train.learning_rate?",
        ),
        (["recipe=quickstart", "zzz=1"], f"zzz: no such key; known here: {KEYS}"),
        (["recipe=quickstart", "train.max_steps=ten"], "train.max_steps='ten': expected int"),
        (["recipe=quickstart", "train.max_steps=1.5"], "train.max_steps=1.5: expected int"),
        (["recipe=quickstart", "train.seed=null"], "train.seed=None: expected int"),
        (["recipe=quickstart", "corpus.strict=1"], "corpus.strict=1: expected bool"),
        (["recipe=quickstart", "train=3"], "train=3: expected keys below it, such as train.passes"),
        (["recipe=quickstart", "train.betas=[a]"], "train.betas[0]='a': expected float"),
        (["recipe=quickstart", "eval.runs=[{dtype: float32}]"], "eval.runs[0].name: missing"),
        (
            ["recipe=quickstart", "eval.runs=[{name: a, lenght: 3}]"],
            "eval.runs[0].lenght: no such key; did you mean eval.runs[0].length?",
        ),
        (["recipe=quickstart", "stages=trian"], f"stages='trian': expected one of {STAGE_NAMES}"),
        (["recipe=quickstart", "drafter=eagle9"], f"drafter='eagle9': expected one of {FAMILIES}"),
        (
            ["recipe=quickstart", "drafter.unrol=3"],
            "drafter.unrol: no such key; did you mean drafter.unroll?",
        ),
        (["recipe=quickstart", "target.dtype=fp8"], "target.dtype='fp8': expected one of float32, bfloat16"),
        (["recipe=quickstart", "train.passes=-1"], "train.passes=-1.0: expected at least 0.0"),
        (
            ["recipe=quickstart", "eval.runs=[]"],
            "eval.runs=[]: expected at least one run; the first is the headline of the report",
        ),
    ],
)
def test_a_mistake_is_told_with_key_value_and_what_is_allowed(words, message):
    with pytest.raises(ValueError) as error:
        compose(words)
    assert str(error.value) == message


LOW = "eval.runs.a.draft_temperature"
NO_TREE = "no effect with proposal=chain; expected proposal=tree, or no value"
NO_RUN = (
    "no such run; expected eval.runs.NAME or the index of one of "
    "['chain5_t0', 'tree24_t0', 'chain5_t1', 'chain5_t0_fp32']"
)
NAMES = (
    "expected different names of letters, digits, '_', '-' and '.', none of them that of "
    "eval.baseline='ngram'"
)
BETAS = "expected two numbers from 0 to below 1"


@pytest.mark.parametrize(
    "words, message",
    [
        ("eval.runs=[{name: a, draft_temperature: 0.5}]", f"{LOW}=0.5: expected 0 at temperature 0"),
        (
            "eval.runs=[{name: a, temperature: 1, draft_temperature: -1}]",
            f"{LOW}=-1.0: expected at least 0.0",
        ),
        ("eval.runs=[{name: a, top_p: 0}]", "eval.runs.a.top_p=0.0: expected above 0, at most 1"),
        ("eval.runs=[{name: a, top_p: 1.5}]", "eval.runs.a.top_p=1.5: expected above 0, at most 1"),
        ("eval.runs=[{name: a, min_p: 2}]", "eval.runs.a.min_p=2.0: expected 0.0 to 1.0"),
        (
            "eval.runs=[{name: a, presence_penalty: 3}]",
            "eval.runs.a.presence_penalty=3.0: expected -2.0 to 2.0",
        ),
        ("regenerate.top_p=0", "regenerate.top_p=0.0: expected above 0, at most 1"),
        ("eval.runs=[{name: a, top_k_filter: -1}]", "eval.runs.a.top_k_filter=-1: expected at least 0"),
        (
            "eval.runs=[{name: a, proposal: tree, law: target_only, nodes: 0}]",
            "eval.runs.a.nodes=0: expected at least 1",
        ),
        (
            "eval.runs=[{name: a, proposal: tree, law: target_only, top_k: 0}]",
            "eval.runs.a.top_k=0: expected at least 1",
        ),
        ("eval.sampling_tokens=0", "eval.sampling_tokens=0: expected at least 1"),
        ("eval.bootstrap=0", "eval.bootstrap=0: expected at least 1"),
        ("train.eval_prompts=0", "train.eval_prompts=0: expected at least 1"),
        ("objective.terms={}", "objective.terms={}: expected at least one"),
        ("objective.terms={mse: 1}", f"objective.terms='mse': expected one of {', '.join(TERMS)}"),
        ("objective.terms={kl: 1, tv: -1}", "objective.terms.tv=-1.0: expected above 0"),
        ("objective.slot_decay=0", "objective.slot_decay=0.0: expected above 0"),
        ("objective.dpace=1.5", "objective.dpace=1.5: expected 0.0 to 1.0"),
        ("objective={dpace: 0.5, slot_decay: 1}", "objective.slot_decay=1.0: no effect with objective.dpace"),
        ("objective.lambda_decay=3", "objective.lambda_decay=3.0: no effect without lk_lambda"),
        ("objective.chunk=-1", "objective.chunk=-1: expected at least 0"),
        ("train.learning_rate=0", "train.learning_rate=0.0: expected above 0"),
        ("train.muon_learning_rate=0", "train.muon_learning_rate=0.0: expected above 0"),
        ("train.betas=[0.9]", f"train.betas=[0.9]: {BETAS}"),
        ("train.betas=[0.9,1]", f"train.betas=[0.9, 1.0]: {BETAS}"),
        ("train.betas=[-0.1,0.9]", f"train.betas=[-0.1, 0.9]: {BETAS}"),
        ("train.muon_momentum=1", "train.muon_momentum=1.0: expected 0 to below 1"),
        ("train.weight_decay=-0.1", "train.weight_decay=-0.1: expected at least 0.0"),
        ("train.clip=0", "train.clip=0.0: expected above 0"),
        ("train.clip=-1", "train.clip=-1.0: expected above 0"),
        ("train.max_steps=-3", "train.max_steps=-3: expected at least 0"),
        ("train.eval_every=-1", "train.eval_every=-1: expected at least 0"),
        ("train.max_bad_fraction=2", "train.max_bad_fraction=2.0: expected 0.0 to 1.0"),
        ("train.seed=-1", "train.seed=-1: expected at least 0"),
        ("train.micro_tokens=8192", "train.batch_tokens=4096: expected at least train.micro_tokens=8192"),
        ("eval.max_prompts=-1", "eval.max_prompts=-1: expected at least 0"),
        ("eval.greedy_prompts=0", "eval.greedy_prompts=0: expected at least 1"),
        ("eval.greedy_tokens=0", "eval.greedy_tokens=0: expected at least 1"),
        ("eval.seed=-1", "eval.seed=-1: expected at least 0"),
        ("compare.seeds=[0,-1]", "compare.seeds=-1: expected at least 0"),
        ("regenerate.temperatures=[]", "regenerate.temperatures=[]: expected at least one"),
        ("stages=[]", "stages=[]: expected at least one"),
        ("eval.runs=[{name: a}, {name: a}]", f"eval.runs name='a': {NAMES}"),
        ("eval.runs=[{name: a/b}]", f"eval.runs name='a/b': {NAMES}"),
        ("eval.runs=[{name: ngram}]", f"eval.runs name='ngram': {NAMES}"),
        ("eval.runs=[{name: a, nodes: 8}]", f"eval.runs.a.nodes=8: {NO_TREE}"),
        ("eval.runs.chain5_t0.top_k=4", f"eval.runs.chain5_t0.top_k=4: {NO_TREE}"),
        ("eval.runs=[{name: a, top_p: 0.9}]", "eval.runs.a.top_p=0.9: no effect at temperature 0"),
        ("eval.runs=[{name: a, top_k_filter: 5}]", "eval.runs.a.top_k_filter=5: no effect at temperature 0"),
        ("eval.runs=[{name: a, min_p: 0.1}]", "eval.runs.a.min_p=0.1: no effect at temperature 0"),
        ("eval.runs.9.length=3", f"eval.runs.9.length: {NO_RUN}"),
        ("eval.runs.chain9.length=3", f"eval.runs.chain9.length: {NO_RUN}"),
        ("eval.baseline=nosuch", f"eval.baseline='nosuch': expected one of {FAMILIES}"),
        (
            "eval.runs=[{name: a, drafter: nosuch}]",
            f"eval.runs.a.drafter='nosuch': expected one of {FAMILIES}",
        ),
    ],
)
def test_a_value_that_a_later_stage_would_choke_on_is_refused_at_the_door(words, message):
    with pytest.raises(ValueError) as error:
        quickstart(words)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"muon_learning_rate": 0.1}, "muon_learning_rate=0.1: no effect with train.optimizer=adamw"),
        ({"muon_momentum": 0.9}, "muon_momentum=0.9: no effect with train.optimizer=adamw"),
        (
            {"skip_bad": True, "features": "online"},
            "skip_bad=True: no effect with train.features=online; expected False",
        ),
    ],
)
def test_settings_of_the_training_without_effect_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        TrainConfig(**settings)
    assert str(error.value) == f"train.{message}"


def test_a_recipe_without_a_corpus_regenerates():
    assert compose(["recipe=eagle3_llama", "stages=regenerate"]).corpus.path == ""


ANY_TREE = "target_only or recursive or typical or thresholds"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"proposal": "tree"}, f"law=rejection: verifies chains only, expected {ANY_TREE} for a tree"),
        (
            {"proposal": "tree", "law": "block"},
            f"law=block: verifies chains only, expected {ANY_TREE} for a tree",
        ),
        (
            {"law": "recursive"},
            "law=recursive: a chain has no siblings, expected rejection, block or a tree",
        ),
        (
            {"law": "strict"},
            "law='strict': expected one of rejection, block, target_only, recursive, typical, thresholds",
        ),
        (
            {"law": "typical"},
            "law=typical: has no effect at temperature 0, expected a lossless law",
        ),
        (
            {"law": "thresholds", "temperature": 1.0},
            "leniency: thresholds of 1 are law target_only, expected one below 1",
        ),
        (
            {"law": "block", "temperature": 1.0, "leniency": Leniency(epsilon=0.2)},
            "leniency.epsilon=0.2: has no effect on law block, expected no value",
        ),
        (
            {"law": "typical", "temperature": 1.0, "leniency": Leniency(threshold_acc=0.5)},
            "leniency.threshold_acc=0.5: has no effect on law typical, expected no value",
        ),
    ],
)
def test_laws_that_do_not_fit_the_run_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError) as error:
        DecodeRunConfig(name="t", **settings)
    assert str(error.value) == f"eval.runs.t.{message}"


@pytest.mark.parametrize("value", [0.0, 1.5])
def test_a_leniency_outside_0_to_1_is_refused(value):
    with pytest.raises(ValueError, match=f"^leniency.threshold_single={value}: expected above 0, at most 1$"):
        Leniency(threshold_single=value)


def test_the_headline_cannot_be_lossy():
    run = DecodeRunConfig(name="t", law="typical", temperature=1.0)
    message = "^eval.runs.0.law=typical: lossy, but the headline must be lossless$"
    with pytest.raises(ValueError, match=message):
        EvalConfig(runs=[run])
    assert EvalConfig(runs=[DecodeRunConfig(name="a"), run]).runs[1].lossy


def test_leniency_is_set_from_the_command_line():
    words = (
        "eval.runs=[{name: a}, {name: b, law: thresholds, temperature: 1, leniency: {threshold_acc: 0.5}}]"
    )
    assert quickstart(words).eval.runs[1].leniency.of("thresholds") == {
        "threshold_single": 1.0,
        "threshold_acc": 0.5,
    }


def test_a_static_tree_says_its_own_length_and_nodes():
    run = DecodeRunConfig(name="s", proposal="static", law="target_only", paths=[[0], [1], [0, 0]])
    assert (run.length, run.nodes) == (2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"paths": [[0]]}, "^eval.runs.a.paths: no effect with proposal=chain"),
        ({"proposal": "static", "law": "target_only"}, r"^eval.runs.a.paths=\[\]: expected at least one"),
        ({"proposal": "static", "paths": [[0]]}, "^eval.runs.a.law=rejection: verifies chains only"),
        (
            {"proposal": "static", "paths": [[0]], "law": "block"},
            "^eval.runs.a.law=block: verifies chains only",
        ),
        (
            {"proposal": "static", "paths": [[0]], "law": "recursive"},
            "^eval.runs.a.law=recursive: needs drawn siblings, a static tree's are chosen; expected a tree$",
        ),
        (
            {"proposal": "tree", "law": "recursive", "adaptive": True},
            "^eval.runs.a.adaptive=True: law recursive draws its tree in full, expected False$",
        ),
        (
            {"proposal": "static", "law": "target_only", "paths": [[0], [1, 1]]},
            r"^eval.runs.a.paths: path \[1, 1\] needs its parent \[1\] in the tree",
        ),
        (
            {"proposal": "static", "law": "target_only", "paths": [[0]], "length": 3},
            "^eval.runs.a.length=3: the paths say 1; leave it out",
        ),
        ({"costs": [1.0, 0.1, 0.1]}, "^eval.runs.a.costs=.*: no effect without adaptive"),
        ({"adaptive": True, "costs": [1.0, 0.1]}, r"^eval.runs.a.costs=\[1.0, 0.1\]: expected \[\], or "),
        ({"adaptive": True, "costs": [0.0, 0.1, 0.1]}, "^eval.runs.a.costs=.*root above 0"),
    ],
)
def test_settings_of_trees_and_budgets_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DecodeRunConfig(name="a", **settings)


def test_paths_and_costs_come_from_the_command_line():
    words = "eval.runs=[{name: a, proposal: static, law: target_only, paths: [[0],[0,1]], adaptive: true}]"
    (run,) = quickstart(words).eval.runs
    assert (run.paths, run.adaptive, run.costs, run.length) == ([[0], [0, 1]], True, [], 2)


def test_whole_numbers_serve_as_floats_but_truth_values_do_not():
    assert convert(float, 3, "x") == 3.0
    with pytest.raises(ValueError, match="^x=True: expected float$"):
        convert(float, True, "x")

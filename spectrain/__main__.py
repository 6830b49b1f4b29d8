"""The command: python -m spectrain recipe=NAME [stages=...] [run_dir=PATH] [key=value ...].

Reads words, calls the stages, turns errors into one line and an exit code. Knows no stage's work.
"""

import logging
import os
import sys
import traceback
import warnings
from textwrap import fill

from spectrain import __version__
from spectrain.config import ON_REQUEST, STAGES

HELP = """\
spectrain {version}: train, evaluate and export drafters for speculative decoding

  python -m spectrain recipe=NAME [stages=a,b] [run_dir=PATH] [key=value ...]
  python -m spectrain recipe=NAME processes=2   or: torchrun, accelerate launch

recipes (recipes/README.md says what each is; recipe=FILE.yaml takes your own)
{recipes}
stages, the first six by default
{stages}
  A finished stage is reused, a killed one goes on when run again.

keys used most
  target=PATH              folder or hub id of the target (target.path)
  corpus.path=FILE         conversations: .jsonl .json .parquet hub:OWNER/NAME
  target.dtype=float32     dtype for capture and decoding
  train.passes=8           times the corpus is seen
  train.max_steps=100      optimizer steps at most
  train.features=online    run the target in the loop, no shards on disk
  drafter.unroll=5         steps of the training-time test (EAGLE-3)
  eval.max_prompts=20      held-out prompts used
  device=cpu               auto, cpu or cuda
  All keys, types and defaults: spectrain/config.py.

results in run_dir, runs/NAME by default
  report.html report.json checkpoints/ export/ metrics.jsonl config.yaml

exit codes
  0 done   1 failed   2 wrong input   3 not lossless: a certificate failed
  SPECTRAIN_DEBUG=1 shows the traceback of an error and the libraries' messages."""


def main(words: list[str]) -> int:
    """Run the command with these words and return its exit code."""
    if {"-h", "--help"} & set(words):
        print(help_text())
        return 0
    if "--version" in words:
        print(__version__)
        return 0
    code, said = attempt(words)
    if said:
        print(said, file=sys.stderr)
    return code


def attempt(words: list[str]) -> tuple[int, str]:
    """Do what the words ask; the exit code, and what is to be said of an error."""
    debug = os.environ.get("SPECTRAIN_DEBUG", "") not in ("", "0")
    try:
        return _run(words, debug)
    except ValueError as error:
        return _fail(error, 2, debug)
    except OSError as error:
        return _fail(error, 1, debug)
    except KeyboardInterrupt:
        return 130, "stopped; the same command goes on from here"


def help_text() -> str:
    """One screen: at most 40 lines of 80 columns."""
    from spectrain.compose import recipe_names

    recipes, stages = (
        fill(text, 80, initial_indent="  ", subsequent_indent="  ")
        for text in ("  ".join(recipe_names()), " ".join(STAGES + ON_REQUEST))
    )
    return HELP.format(version=__version__, recipes=recipes, stages=stages)


def _run(words: list[str], debug: bool) -> tuple[int, str]:
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("spectrain").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    if not debug:
        silence_libraries()
    from spectrain.compose import compose

    config = compose(words)
    from spectrain.checks import CheckFailed
    from spectrain.eval.certificate import CertificateFailed
    from spectrain.stages import EVERY_PROCESS, run

    if config.processes > 1 and "WORLD_SIZE" not in os.environ and {*config.stages} & {*EVERY_PROCESS}:
        from spectrain.launch import cap, launch

        if (processes := cap(config.processes, config.device)) > 1:
            return launch(words, processes)

    try:
        run(config)
    except CertificateFailed as error:
        return _fail(error, 3, debug)
    except CheckFailed as error:
        return _fail(error, 1, debug)
    return 0, ""


def silence_libraries() -> None:
    """Leave the terminal to our own lines; must come before the libraries are imported."""
    settings = {
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_SILENT": "true",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")
    # DeepSpeed sets its logger's level on import, so a filter must hold back what is below an error.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def _fail(error: BaseException, code: int, debug: bool) -> tuple[int, str]:
    trace = "".join(traceback.format_exception(error)) if debug else ""
    return code, f"{trace}error: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

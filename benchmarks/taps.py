"""What 8-bit taps cost in tau: two runs of one recipe, alike but for train.taps_bits, compared text by text.

    S='stages=[prepare,capture,train,eval]'
    python -m spectrain recipe=quickstart $S run_dir=runs/taps_exact
    python -m spectrain recipe=quickstart $S run_dir=runs/taps_8 train.taps_bits=8
    python benchmarks/taps.py runs/taps_exact runs/taps_8

Prints for each run of the evaluation both tau and their difference, with a 95% bootstrap interval over the
prompts that both decoded; then the bytes of both captures. Two trainings of unlike seeds differ too: what
taps_8 costs is judged beside that.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from spectrain.artifacts import MANIFEST, read_json
from spectrain.eval.records import read_texts
from spectrain.features import FeatureStore


def sums(folder: Path, run: str) -> dict[str, np.ndarray]:
    """Tokens emitted and verifications of each prompt."""
    found: dict[str, np.ndarray] = {}
    for text in read_texts(folder / "eval" / "runs" / run / "texts.jsonl"):
        rounds = text.speculative.rounds
        more = np.array([sum(r.emitted for r in rounds), len(rounds)], dtype=float)
        found[text.id] = found.get(text.id, np.zeros(2)) + more
    return found


def compare(exact: Path, coded: Path, run: str, resamples: int) -> dict[str, object]:
    arms = [sums(folder, run) for folder in (exact, coded)]
    ids = sorted(arms[0].keys() & arms[1].keys())
    sums_APK = np.array([[arm[i] for i in ids] for arm in arms])
    draws = np.random.default_rng(0).multinomial(len(ids), np.full(len(ids), 1 / len(ids)), size=resamples)
    tau = np.divide(*np.moveaxis(sums_APK.sum(1), -1, 0))
    drawn = np.einsum("bp,apk->kab", draws, sums_APK)
    low, high = np.percentile(drawn[0, 1] / drawn[1, 1] - drawn[0, 0] / drawn[1, 0], [2.5, 97.5])
    numbers = {"tau": tau[0], "tau_8_bits": tau[1], "change": tau[1] - tau[0], "low": low, "high": high}
    return {"run": run, "prompts": len(ids)} | {key: round(float(n), 4) for key, n in numbers.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("exact", type=Path)
    parser.add_argument("coded", type=Path)
    parser.add_argument("--resamples", type=int, default=2000)
    args = parser.parse_args()
    stores = [FeatureStore.load(folder / "features") for folder in (args.exact, args.coded)]
    bits = [store.settings["taps_bits"] for store in stores]
    same = [{k: v for k, v in store.settings.items() if k != "taps_bits"} for store in stores]
    if bits != [0, 8] or same[0] != same[1]:
        parser.error(f"expected captures alike but for train.taps_bits 0 and 8, found {bits}: {same}")
    for run in sorted(path.name for path in (args.exact / "eval" / "runs").iterdir()):
        print(json.dumps(compare(args.exact, args.coded, run, args.resamples)))
    size = [read_json(store.folder / MANIFEST)["bytes"] for store in stores]
    print(json.dumps({"bytes": size[0], "bytes_8_bits": size[1], "share": round(size[1] / size[0], 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

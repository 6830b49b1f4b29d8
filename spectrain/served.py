"""A target whose layers run in another engine: states come from a server or from files, the rest is ours.

What stays here is config, tokenizer, embedding, final norm and head; the final norm is applied to the
engine's last state, so `final`, logits, log-sum-exp and arg-max are computed as for a target in this process.
Every answer of a server is checked: the log-probabilities it gives after the text must be those of our norm
and head. Decoding is refused. Knows no engine (`spectrain/server.py`, `spectrain/state_files.py`).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from spectrain.config import TargetConfig
from spectrain.data.packing import Sample
from spectrain.server import Server
from spectrain.skeleton import Checkpoint, final_norm, load_skeleton
from spectrain.state_files import Answer, StateFolder, default_layer_ids
from spectrain.target import EXPERTS, Layout, Target, TargetStates, packed_layout

# Largest difference of log-probabilities, as a share of the largest logit: a few roundings of the dtype.
LAW_BOUND = {torch.float32: 1e-4, torch.bfloat16: 2**-5}


class Source(Protocol):
    """Where states come from."""

    def announce(self, samples: Sequence[Sample]) -> None:
        """The texts that will be read, in order."""

    def read(self, documents: Sequence[torch.Tensor], tap_ids: Sequence[int]) -> list[Answer]:
        """The states of each text int [T]."""

    def release(self) -> None:
        """Nothing is read for now."""


class ServedTarget(Target):
    """A model on the meta device but for embedding, final norm and head (`spectrain.skeleton`)."""

    def __init__(self, model: Any, tokenizer: Any, source: Source, checkpoint: Checkpoint, *, path: str = ""):
        super().__init__(model, tokenizer, path=path)
        self.source, self.checkpoint = source, checkpoint
        self.norm = final_norm(self.decoder, self.hidden_size)
        self._fingerprint: dict[str, str] = {}

    @property
    def reads_layouts(self) -> bool:
        """A server answers for whole texts."""
        return False

    @torch.no_grad()
    def states(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor, layout: Layout, *, taps: Sequence[int] = ()
    ) -> TargetStates:
        """States at the layer ids `taps` and after the final norm, each document of the row as a text of its
        own.

        Raises ValueError for any layout but a packed one, and where the source refuses.
        """
        if not isinstance(layout, packed_layout):
            raise ValueError(
                f"target {self.path}: target.server gives the states of whole texts; decoding needs the "
                "target in this process"
            )
        documents = [call.ids.cpu() for call in layout.calls(ids_T, positions_T)]
        parts = []
        for answer in self.source.read(documents, taps):
            final = self.norm(answer.states.before_norm(self.num_layers).to(self.device))
            self._check(answer, final[-1])
            parts.append((answer.states.taps(taps).to(self.device), final))
        return TargetStates(torch.cat([tap for tap, _ in parts]), torch.cat([final for _, final in parts]))

    def _check(self, answer: Answer, final_D: torch.Tensor) -> None:
        """Compare the engine's own log-probabilities with ours; non-finite states are the capture's to
        reject."""
        if not answer.top or not final_D.isfinite().all():
            return
        logits = self.logits(final_D[None])[0].float()
        theirs = torch.tensor(list(answer.top.values()), device=self.device)
        ours = logits.log_softmax(-1)[list(answer.top)]
        worst, bound = (ours - theirs).abs().max().item(), LAW_BOUND[self.dtype] * logits.abs().max().item()
        if not worst <= bound:
            raise ValueError(
                f"target {self.path}: after a text of {len(answer.states.states)} tokens the server's "
                f"log-probabilities differ by {worst:.3g} from those of its last state with our norm and "
                f"head (bound {bound:.3g}): it serves another target, or one of a form that spectrain does "
                "not know"
            )

    def announce(self, samples: Sequence[Sample]) -> None:
        self.source.announce(samples)

    def release(self) -> None:
        self.source.release()

    def self_test(self, ids_T: torch.Tensor | None = None, *, tolerance: float = 1e-4) -> float:
        """Nothing of its own: each answer is compared when it comes, the first before anything is written."""
        return 0.0

    def fingerprint(self) -> dict[str, str]:
        """The same as of the target loaded whole."""
        self._fingerprint = self._fingerprint or super().fingerprint()
        return self._fingerprint

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in sorted(self.model.state_dict().items()):
            if EXPERTS not in name:
                yield name, self.checkpoint.tensor(name) if tensor.is_meta else tensor


def load_served(config: TargetConfig, path: str, device: str) -> ServedTarget:
    """The target of target.server; `path`: its folder or hub id, of which every file is fetched.

    Raises ValueError naming the key or the file that is wrong.
    """
    folder, dtype, server = Path(path), getattr(torch, config.dtype), config.server
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    model = load_skeleton(folder, dtype, device, trust_remote_code=config.trust_remote_code)
    text = model.config.get_text_config()
    shape: dict[str, Any] = {"hidden_size": text.hidden_size, "dtype": dtype}
    source: Source
    if server.files:
        layer_ids = server.layer_ids or default_layer_ids(text.num_hidden_layers)
        source = StateFolder(Path(server.files).expanduser(), layer_ids, **shape)
    else:
        source = Server(server, path, num_layers=text.num_hidden_layers, **shape)
    return ServedTarget(model, tokenizer, source, Checkpoint(folder), path=config.path)

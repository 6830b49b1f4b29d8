"""The section `target.server` of the settings: a target that another engine runs.

Knows no vLLM and opens nothing (`spectrain/server.py` and `spectrain/state_files.py` do).
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the target's states come from if not from this process; one of url, python and files is given."""

    url: str = ""
    """A running vLLM server, such as http://host:8000 (docs/serving.md says how to start it)."""
    python: str = ""
    """Python of an environment with vLLM: a server is started there and stopped when it is not needed."""
    arguments: list[str] = field(default_factory=list)
    """Of the server that `python` starts, such as --tensor-parallel-size=8."""
    files: str = ""
    """Folder of hidden-state files (hs_*.safetensors) of the speculators project."""
    folder: str = ""
    """Where this process sees the folder into which the server of `url` writes; empty: under the same name.
    With `python`: where to write; empty: the system's folder of temporary files."""
    layer_ids: list[int] = field(default_factory=list)
    """The layer ids of files that do not name them, in the engine's count and order, the last layer's output
    included; empty: 2, n//2, n-3 and n of n layers."""
    requests: int = 32
    """Requests under way at once."""

    @property
    def given(self) -> bool:
        return bool(self.url or self.python or self.files)

    def __post_init__(self):
        key = "target.server"
        sources = [name for name in ("url", "python", "files") if getattr(self, name)]
        if len(sources) > 1:
            raise ValueError(f"{key}: {' and '.join(sources)} given; expected one of url, python, files")
        for name, users in (
            ("arguments", ("python",)),
            ("folder", ("url", "python")),
            ("layer_ids", ("url", "files")),
        ):
            if getattr(self, name) and not set(users) & set(sources):
                raise ValueError(
                    f"{key}.{name}={getattr(self, name)!r}: no effect without {key}.{' or '.join(users)}"
                )
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{key}.url={self.url!r}: expected http://HOST:PORT")
        if self.requests < 1:
            raise ValueError(f"{key}.requests={self.requests!r}: expected at least 1")

"""Files that survive a kill: written to a temporary name, flushed, renamed; folders with a manifest of
content hashes.

Knows nothing of what the files mean. Every write error ends the run; nothing half-written ever has its final
name.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from spectrain.checks import CheckFailed

MANIFEST = "manifest.json"

log = logging.getLogger(__name__)


def fingerprint(settings: Any) -> str:
    """A short hash of any JSON-like value; equal values give equal hashes whatever the order of keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


def hash_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically; raises OSError that names the path and, on a full disk, says
    so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(staging, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except OSError as error:
        staging.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            size_mib = len(content) / 2**20
            raise OSError(
                error.errno,
                f"disk full: {size_mib:.1f} MiB do not fit; free space and run the same command again",
                str(path),
            ) from error
        raise


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Parsed JSON; raises ValueError naming the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: damaged JSON ({error})") from None


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file atomically and return its SHA-256."""
    content = save({k: v.contiguous() for k, v in tensors.items()}, dict(metadata or {}))
    write_bytes(path, content)
    return hash_bytes(content)


def read_tensors(path: Path, *, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a safetensors file; raises ValueError naming the file when it is missing or damaged,
    CheckFailed when it is not of hash `sha256`."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if sha256 is not None and (found := hash_file(path)) != sha256:
        raise CheckFailed(
            f"{path}: content hash {found[:16]}, the manifest says {sha256[:16]}: the file is damaged"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged safetensors file ({error})") from None


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold the file `lock`, which a process that is killed lets go; raises ValueError where another one holds
    it. A file system without locks is named, and all goes on."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{lock}: another command is at work in this folder; wait for it or end it"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            log.warning("%s: no locks on its file system; let no second command work there", lock)
        yield


def is_done(folder: Path, print_: str) -> bool:
    """Whether `folder` holds a finished result with fingerprint `print_`."""
    path = folder / MANIFEST
    return path.exists() and read_json(path).get("fingerprint") == print_


def reuse_or_run(folder: Path, settings: Any, make: Callable[[], Mapping[str, Any]]) -> bool:
    """Run `make` unless `folder` is finished with these settings; then write the manifest. True if it was
    reused.

    `make` writes into `folder` and returns what the manifest should hold besides `settings` and
    `fingerprint`.
    """
    print_ = fingerprint(settings)
    if is_done(folder, print_):
        return True
    (folder / MANIFEST).unlink(missing_ok=True)  # it must not outlive what it describes
    content = make()
    write_json(folder / MANIFEST, {"fingerprint": print_, "settings": settings, **content})
    return False

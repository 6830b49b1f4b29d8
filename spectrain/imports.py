"""Warm start: a published drafter's settings, draft vocabulary and tensors in place of new ones.

`drafter.init_from` names its folder or hub id; the family's file says what the names there mean. Training and
evaluation then go on as with a drafter of our own. Knows no family and no names of tensors.
"""

import importlib
import json
import logging
from dataclasses import MISSING, fields, replace
from typing import Any

import torch
from torch import nn

from spectrain.checkpoint import IDENTITY
from spectrain.drafters.published import Import, Published, check_floats
from spectrain.target import Target

log = logging.getLogger(__name__)


def open_import(config: Any, target: Target) -> tuple[Any, Import | None]:
    """The family's settings with those that the published files decide, and the files; as they are, and None,
    where nothing is imported.

    config: the family's Config. Raises ValueError naming the key that the recipe sets otherwise.
    """
    if not any(field.name == "init_from" for field in fields(config)) or not config.init_from:
        return config, None
    family = importlib.import_module(f"spectrain.drafters.{config.family}")
    found = family.imported(Published(config.init_from), config, target)
    _tell_other_target(found.source, target)
    given = {field.name: field for field in fields(config)}
    for key, value in found.settings.items():
        field, mine = given[key], getattr(config, key)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if mine not in (default, value):
            raise ValueError(
                f"drafter.{key}={mine!r}: {config.init_from} has {value!r} (drafter.init_from); expected "
                "that value, or none"
            )
    return replace(config, **found.settings), found


def _tell_other_target(source: Published, target: Target) -> None:
    """Our exports name their target; another one, such as a fine-tuned one, is the user's choice."""
    trained = json.loads(source.metadata.get("target", "{}"))
    here = target.fingerprint()
    if differing := [key for key in IDENTITY if key in trained and trained[key] != here[key]]:
        log.warning("%s: trained on another target (different %s)", source.path, ", ".join(differing))


@torch.no_grad()
def load(found: Import, drafter: nn.Module) -> None:
    """Copy the published tensors into a drafter built with the settings and kept ids of `found`.

    Raises ValueError naming file and tensor where one is missing, unknown, misshapen, quantised or
    not finite.
    """
    used = set(found.unread)
    for ours, own in drafter.state_dict().items():
        theirs = found.theirs(ours)
        if theirs is None:
            continue
        value = found.read(theirs)
        if theirs in found.source.files:  # not where the family stacks it from several
            check_floats(found.source.files, theirs, value)
        where = f"{found.source.files.get(theirs, found.source.path)}: tensor {theirs}"
        if value.shape != own.shape:
            raise ValueError(f"{where} has shape {list(value.shape)}: expected {list(own.shape)} of {ours}")
        if not value.isfinite().all():
            raise ValueError(f"{where} holds values that are not finite")
        own.copy_(value)
        used.add(theirs)
    if unknown := sorted(set(found.source.files) - used):
        file = found.source.files[unknown[0]]
        raise ValueError(f"{file}: tensor {unknown[0]} is not one that this drafter has")
    log.info("drafter.init_from: %d tensors of %s", len(used - found.unread), found.source.path)

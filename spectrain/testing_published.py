"""For tests: drafters' folders as anybody may have written them, and what is read from one."""

import json

import torch
from safetensors.torch import save_file

from spectrain.drafters import eagle3
from spectrain.imports import load, open_import


def written(folder, config, tensors, *, name="model.safetensors"):
    """A new folder with config.json and one file of tensors, which is pickled unless it is a .safetensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    else:
        torch.save(dict(tensors), folder / name)
    return folder


def imported(folder, target, family=eagle3, **settings):
    """The drafter that `drafter.init_from=folder` gives; other numbers than the published ones before it."""
    config, found = open_import(family.Config(init_from=str(folder), **settings), target)
    kept = torch.arange(target.vocab_size) if found.kept_ids is None else found.kept_ids
    torch.manual_seed(99)
    drafter = family.build(config, target, kept)
    load(found, drafter)
    return drafter


def same(one, other):
    """Whether two drafters of the same tensors hold the same numbers and draft vocabulary."""
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    return all(torch.equal(a[name], b[name]) for name in a) and torch.equal(one.kept_ids, other.kept_ids)


def nulls(value, where=""):
    """Paths of the keys of a parsed JSON file whose value is null."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [path for key, inner in pairs for path in nulls(inner, f"{where}.{key}")]
    return [where] if value is None else []

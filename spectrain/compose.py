"""From `key=value` words to one typed RunConfig: Hydra composes the YAML, dataclasses check keys and types.

A recipe is a diff: what it leaves out stands in spectrain/config.py. Knows no stage and imports no torch
itself; the drafter's family is imported last, so that a wrong key elsewhere is told at once.
"""

import dataclasses
import importlib
from dataclasses import MISSING
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from spectrain.checks import choose
from spectrain.config import RunConfig


def recipe_names() -> list[str]:
    """Names of the recipes that the package carries."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in files("spectrain.recipes").iterdir()
        if entry.name.endswith(".yaml")
    )


def families() -> tuple[str, ...]:
    """Names of the drafter families, one per conf/drafter/NAME.yaml."""
    folder = files("spectrain.conf").joinpath("drafter")
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir()))


def compose(words: list[str]) -> RunConfig:
    """The settings that `recipe=NAME key=value ...` mean.

    recipe: a name of the package, or the path of a YAML file. Dicts and lists replace what the recipe says.
    Raises ValueError naming the key, with the closest known one.
    """
    pairs = dict(_split(word) for word in words)
    recipe = pairs.pop("recipe", "")
    if not recipe:
        raise ValueError(f"recipe=NAME is missing; known recipes: {', '.join(recipe_names())}")
    name = _store_recipes(recipe)
    groups = []
    if "drafter" in pairs:
        choose("drafter", pairs["drafter"], families())
        groups = [f"drafter={pairs.pop('drafter')}"]
    try:
        with initialize_config_module("spectrain.conf", version_base="1.3"):
            values = hydra_compose("config", overrides=[f"recipe={name}", *groups])
        OmegaConf.set_struct(values, False)
        words = [f"{key}={_quoted(key, value)}" for key, value in pairs.items()]
        for override in OverridesParser.create().parse_overrides(words):
            key = _numbered(override.key_or_group, values)
            OmegaConf.update(values, key, override.value(), merge=False, force_add=True)
        plain = OmegaConf.to_container(values, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key}: recipe {name} needs it: {error.full_key}=VALUE") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(" ".join(str(error).split())) from error
    return typed(cast(dict, plain))


def typed(values: dict[str, Any]) -> RunConfig:
    """RunConfig from untyped values; `drafter` becomes the Config of the family named in `drafter.family`."""
    config = convert(RunConfig, values, "")
    if not isinstance(config.drafter, dict):
        raise ValueError(f"drafter={config.drafter!r}: expected drafter=NAME, one of {', '.join(families())}")
    choose("drafter.family", config.drafter.get("family"), families())
    named = {f"eval.runs.{run.name}.drafter": run.drafter for run in config.eval.runs}
    for key, name in {**named, "eval.baseline": config.eval.baseline}.items():
        if name:
            choose(key, name, families())
    for run in config.eval.runs:
        run.check_shape()
    family = importlib.import_module(f"spectrain.drafters.{config.drafter['family']}")
    return dataclasses.replace(config, drafter=convert(family.Config, config.drafter, "drafter"))


def _split(word: str) -> tuple[str, str]:
    """Key and value of one word, with the short forms target=PATH, path=FOLDER, engine=a[,b] and
    stages=a[,b] written out."""
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise ValueError(f"{word!r}: expected key=value (python -m spectrain --help)")
    if key == "target" and not value.startswith("{"):
        key = "target.path"
    key = {"path": "export.path", "engine": "export.engine"}.get(key, key)
    if key in ("stages", "export.engine") and not value.startswith("["):
        value = f"[{value}]"
    return key, value


def _numbered(key: str, values: Any) -> str:
    """The key with the index of a run of eval.runs for its name. Raises ValueError if there is none such."""
    start = "eval.runs."
    if not key.startswith(start):
        return key
    runs = OmegaConf.select(values, "eval.runs", default=[])
    names = [run.get("name") for run in runs]
    for i, name in enumerate(names):
        for given in (str(i), name):
            if f"{key}.".startswith(f"{start}{given}."):
                return f"{start}{i}{key.removeprefix(f'{start}{given}')}"
    raise ValueError(f"{key}: no such run; expected {start}NAME or the index of one of {names}")


def _quoted(key: str, value: str) -> str:
    """The value for Hydra's parser: a text, such as a path, may hold characters of its grammar."""
    kind = _settings(RunConfig, "").get(key)
    is_text = kind is str or kind is Any and not value.startswith("[")  # corpus.path may be a list
    if is_text and not value.startswith(("'", '"')):
        return "'" + value.replace("'", "\\'") + "'"
    return value


def _store_recipes(recipe: str) -> str:
    """Put the package's recipes, and the file `recipe` if it is one, into Hydra's store; returns its name."""
    found = {name: files("spectrain.recipes").joinpath(f"{name}.yaml").read_text() for name in recipe_names()}
    name = recipe
    if recipe.endswith((".yaml", ".yml")):
        path = Path(recipe).expanduser()
        if not path.is_file():
            raise ValueError(f"recipe={recipe}: no such file; known recipes: {', '.join(found)}")
        name = path.stem
        found[name] = path.read_text()
    if name not in found:
        raise ValueError(f"recipe={recipe}: unknown; known recipes: {', '.join(found)}")
    for stem, text in found.items():
        try:
            content = cast(dict, OmegaConf.to_container(OmegaConf.create(text)))
        except YAMLError as error:
            raise ValueError(f"recipe={stem}: not YAML: {' '.join(str(error).split())}") from error
        node = {"recipe": stem, **content}
        ConfigStore.instance().store(group="recipe", name=stem, node=node, package="_global_")
    return name


def convert(kind: Any, value: Any, key: str) -> Any:
    """`value` from YAML as `kind`: a dataclass, list[X], dict[str, X], int, float, str, bool or Any.

    Raises ValueError naming the full key of an unknown key, a missing key or a value of the wrong type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _section(cast(type, kind), value, key)
    if origin is list and isinstance(value, list):
        return [convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: convert(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is not Any and type(value) is not (origin or kind):
        raise ValueError(f"{key}={value!r}: expected {kind.__name__ if origin is None else kind}")
    return value


def _section(cls: type, values: Any, prefix: str) -> Any:
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise ValueError(
            f"{prefix}={values!r}: expected keys below it, such as {prefix}.{next(iter(fields))}"
        )
    start = f"{prefix}." if prefix else ""
    for name in values:
        if name not in fields:
            key = _first_key(f"{start}{name}", values[name])
            close = get_close_matches(key, _settings(cls, start), 1)
            hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(fields)}"
            raise ValueError(f"{key}: no such key; {hint}")
    for name, field in fields.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{start}{name}: missing")
    return cls(**{name: convert(hints[name], value, f"{start}{name}") for name, value in values.items()})


def _first_key(key: str, value: Any) -> str:
    """Full name of the first setting at or below `key`."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key


def _settings(cls: Any, start: str) -> dict[str, Any]:
    """Full name and type of every setting of a dataclass and its sections."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        is_section = dataclasses.is_dataclass(kind)
        found |= _settings(kind, f"{start}{name}.") if is_section else {f"{start}{name}": kind}
    return found

"""Opens the config that a recipe's name, a function, a config file or the folder of a run stands
for."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from gruppo import trust
from gruppo.config import serialization
from gruppo.config.schema import Config
from gruppo.integrity import check_links
from gruppo.loading import did_you_mean, is_file_name, load_object
from gruppo.recipes import RECIPES
from gruppo.types import GruppoError

log = logging.getLogger("gruppo")


def recipe_config(name: str) -> Config:
    """The config of a built-in recipe, file.py:function, a config file or a run's folder."""
    if name in RECIPES:
        return RECIPES[name]()
    path = config_file(name)
    if path is not None:
        is_run = is_of_run(path)
        # The folder of a run, and not a file of the user's own in any folder.
        if path != Path(name) or (path.parent / "manifest.json").is_file():
            check_links(path.parent)
        config = serialization.load(path)
        if not is_run:  # the user wrote it
            return config
        own, place = config.runs_dir, path.resolve().parent.parent
        # Nobody else chooses where runs are written.
        if not (os.path.exists(own) and os.path.samefile(own, place)):
            config = replace(config, runs_dir=Config().runs_dir)
        return replace(config, name="")  # it is taken
    if name.endswith((".yaml", ".yml")):
        raise GruppoError(f"{name} is YAML; a config file is TOML or JSON.")
    if ":" not in name and not is_file_name(name):
        otherwise = f" Built in: {', '.join(RECIPES)}; or give file.py:function."
        raise GruppoError(f"unknown recipe {name!r}.{did_you_mean(name, RECIPES, otherwise)}")
    recipe = load_object(name)
    config = recipe() if callable(recipe) else recipe
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise GruppoError(f"{name} gives a {kind}; a recipe returns a gruppo.Config.")
    return config


def config_file(name: str) -> Path | None:
    """The config file that a recipe names, itself or by the folder of a run; None for other
    recipes."""
    path = Path(name) / "config.json" if (Path(name) / "config.json").is_file() else Path(name)
    return path if name not in RECIPES and path.suffix in serialization.SUFFIXES else None


def is_of_run(file: Path) -> bool:
    """Whether a config file is that of a run, and not one that the user wrote."""
    place = file.resolve()
    return place.name == "config.json" or (place.parent / "manifest.json").is_file()


def check_code(file: Path, recipe: Config, config: Config, *, trust_run: bool = False) -> None:
    """Refuse code that a run's config file names, unless this user created the run or
    ``trust_run``.

    ``recipe``: as in the file; ``config``: with the options, which may replace names of the file
    and alone turn on ``trust_remote_code``.
    """
    used = {*trust.imports_of_run(serialization.to_dict(config)), trust.REMOTE_CODE}
    named = trust.imports_of_run(serialization.to_dict(recipe))
    is_run = is_of_run(file)
    trust.check(
        file.resolve().parent if is_run else file,
        [name for name in named if name in used and (is_run or trust.REMOTE_CODE in name)],
        trust_run=trust_run or not is_run,  # a config file of the user's own may name what it likes
        trust_remote_code=config.trust_remote_code,
    )
    own = serialization.load(file).runs_dir
    if config.runs_dir == recipe.runs_dir != own:
        log.warning("%s: its runs_dir %r is ignored; new runs go to runs/.", file, own)


def run_stem(name: str) -> str:
    """What a new run of a recipe is named after: the recipe, or the saved run without its time."""
    path = Path(name)
    saved = path.parent.name if path.name == "config.json" else path.name if path.is_dir() else ""
    return re.sub(r"-\d{8}-\d{6}(-\d+)?$", "", saved) or path.stem.split(":")[0] or "run"

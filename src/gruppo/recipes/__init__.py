"""Recipes: functions that return a ``Config``. Each states its hardware, its wall time and the
curve to expect."""

from gruppo.recipes.arithmetic import arithmetic, arithmetic_format, arithmetic_ppo, plain
from gruppo.recipes.diffusion import images
from gruppo.recipes.digits import digits_compress, digits_pretrain
from gruppo.recipes.guess import guess
from gruppo.recipes.restoration import restore

_ALL = (
    arithmetic,
    arithmetic_format,
    arithmetic_ppo,
    guess,
    digits_pretrain,
    digits_compress,
    restore,
    images,
    plain,
)
RECIPES = {recipe.__name__.replace("_", "-"): recipe for recipe in _ALL}
"""The built-in recipes, by the name that ``gruppo train`` takes."""

"""Recipes: functions that return a ``Config``. Each states its hardware, its wall time and the
curve to expect."""

from gruppo.recipes.arithmetic import arithmetic, arithmetic_format, arithmetic_ppo
from gruppo.recipes.diffusion import ddpo, images
from gruppo.recipes.digits import digits_compress, digits_pretrain
from gruppo.recipes.guess import guess
from gruppo.recipes.restoration import (
    denoise_photos,
    restore,
    restore_progressive,
    restore_quick,
)
from gruppo.recipes.text import chat, plain, qwen

_ALL = (
    arithmetic,
    arithmetic_format,
    arithmetic_ppo,
    guess,
    digits_pretrain,
    digits_compress,
    denoise_photos,
    restore,
    restore_progressive,
    restore_quick,
    images,
    plain,
    chat,
    qwen,
    ddpo,
)
RECIPES = {recipe.__name__.replace("_", "-"): recipe for recipe in _ALL}
"""The built-in recipes, by the name that ``gruppo train`` takes."""

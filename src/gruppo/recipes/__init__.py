"""Recipes: functions that return a ``Config``. Each states its hardware, its wall time and the curve to expect."""

from gruppo.recipes.arithmetic import arithmetic
from gruppo.recipes.arithmetic_format import arithmetic_format
from gruppo.recipes.arithmetic_ppo import arithmetic_ppo
from gruppo.recipes.digits import digits_compress, digits_pretrain, digits_sevens
from gruppo.recipes.pictures import pictures
from gruppo.recipes.plain import plain

RECIPES = {
    "arithmetic": arithmetic,
    "arithmetic-format": arithmetic_format,
    "arithmetic-ppo": arithmetic_ppo,
    "digits-pretrain": digits_pretrain,
    "digits-compress": digits_compress,
    "digits-sevens": digits_sevens,
    "pictures": pictures,
    "plain": plain,
}
"""The built-in recipes, by the name that ``gruppo train`` takes."""

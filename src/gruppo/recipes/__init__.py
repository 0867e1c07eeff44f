"""Recipes: functions that return a ``Config``. Each states its hardware, its wall time and the curve to expect."""

from gruppo.recipes.arithmetic import arithmetic
from gruppo.recipes.arithmetic_ppo import arithmetic_ppo
from gruppo.recipes.plain import plain

RECIPES = {"arithmetic": arithmetic, "arithmetic-ppo": arithmetic_ppo, "plain": plain}
"""The built-in recipes, by the name that ``gruppo train`` takes."""

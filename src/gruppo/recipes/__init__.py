"""Recipes: functions that return a ``Config``. Each states its hardware, its wall time and the curve to expect."""

from gruppo.recipes.arithmetic import arithmetic
from gruppo.recipes.arithmetic_format import arithmetic_format
from gruppo.recipes.arithmetic_ppo import arithmetic_ppo
from gruppo.recipes.chat import chat
from gruppo.recipes.ddpo import ddpo
from gruppo.recipes.digits import digits_compress, digits_pretrain, digits_sevens
from gruppo.recipes.guess import guess
from gruppo.recipes.lines import restore_text
from gruppo.recipes.photos import denoise_photos
from gruppo.recipes.pictures import pictures
from gruppo.recipes.plain import plain
from gruppo.recipes.qwen import qwen
from gruppo.recipes.restoration import restore, restore_progressive, restore_quick

RECIPES = {
    "arithmetic": arithmetic,
    "arithmetic-format": arithmetic_format,
    "arithmetic-ppo": arithmetic_ppo,
    "guess": guess,
    "digits-pretrain": digits_pretrain,
    "digits-compress": digits_compress,
    "digits-sevens": digits_sevens,
    "denoise-photos": denoise_photos,
    "restore-text": restore_text,
    "restore": restore,
    "restore-progressive": restore_progressive,
    "restore-quick": restore_quick,
    "pictures": pictures,
    "plain": plain,
    "chat": chat,
    "qwen": qwen,
    "ddpo": ddpo,
}
"""The built-in recipes, by the name that ``gruppo train`` takes."""

"""Recipes: functions that return a ``Config``. Each states its hardware, its wall time and the curve to expect."""

from gruppo.recipes.arithmetic import arithmetic, arithmetic_format, arithmetic_ppo
from gruppo.recipes.diffusion import ddpo, pictures
from gruppo.recipes.digits import digits_compress, digits_pretrain, digits_sevens
from gruppo.recipes.guess import guess
from gruppo.recipes.restoration import denoise_photos, restore, restore_progressive, restore_quick, restore_text
from gruppo.recipes.text import chat, plain, qwen

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

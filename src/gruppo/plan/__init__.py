"""Capacity planning: what a recipe's step takes on a number of GPUs, from formulas and a simulation of the loop."""

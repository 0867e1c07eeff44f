"""A jail for programs that a model wrote; see README.md.

Import nothing here: ``supervisor`` runs in a bare interpreter that has this folder and the standard
library alone.
"""

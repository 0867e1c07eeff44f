"""``python -m gruppo``."""

from gruppo.cli import main

main()

"""``python -m gruppo``."""

from gruppo.cli.app import main

main()

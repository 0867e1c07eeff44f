"""Benchmarks report; tests decide. Each prints JSON and a table."""

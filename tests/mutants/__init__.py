"""Every silent bug, injected: a suite that stays green on one of them is not a suite. See ``make
mutants``."""

"""All symptoms, in the order in which they are reported: first what makes other numbers wrong."""

from __future__ import annotations

from gruppo.doctor import policy, rewards, terms, updates
from gruppo.doctor.finding import Symptom

_ALL = {s.name: s for part in (rewards, policy, terms, updates) for s in part.SYMPTOMS}
_FIRST = ("ratio-not-1", "mismatch", "reward-failures", "skipped-updates", "lr-never-arrives", "still-weights")

SYMPTOMS: tuple[Symptom, ...] = (
    *(_ALL[name] for name in _FIRST),
    *(symptom for name, symptom in _ALL.items() if name not in _FIRST),
)

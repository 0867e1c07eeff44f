"""The benchmark of the jail runs what it says that it runs."""

from __future__ import annotations

from benchmarks import jail
from tests.rewards.kernels import jailed

from gruppo.rewards.code import CodeTests


@jailed
def test_each_program_of_the_batch_is_run_by_itself_and_passes(monkeypatch) -> None:
    sizes = []
    plain = CodeTests._run

    def counted(self: CodeTests, programs: list[str], tests: list) -> list:
        sizes.append(len(set(programs)))
        return plain(self, programs, tests)

    monkeypatch.setattr(CodeTests, "_run", counted)
    found = jail.main(times=1, batch=3)
    assert set(sizes) == {3} and all(ms > 0 for ms in found.values())
    assert any(name.startswith("3 programs") for name in found)

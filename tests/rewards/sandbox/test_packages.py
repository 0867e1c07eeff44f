"""Packages that programs may import in the jail."""

from __future__ import annotations

import pytest
from tests.rewards.kernels import jailed

from gruppo.rewards import resolve_reward
from gruppo.rewards.code import code_tests
from gruppo.rewards.sandbox.jail import Jail
from gruppo.types import GruppoError


@jailed
def test_a_package_that_is_named_can_be_imported_and_no_other():
    reward = resolve_reward("code_tests:packages=numpy,workers=1")
    texts = [
        "import numpy as np\ndef f(x): return np.linalg.norm(np.fft.fft([3, 4])[:1])",
        "import numpy as np\ndef f(x): return np.int64(7)",
        "import torch\ndef f(x): return 7",
        "import numpy as np\ndef f(x): return np.array([7])",
    ]
    assert reward(texts, tests=[["assert f(1) == 7"]] * 4) == [1.0, 1.0, 0.0, 0.0]
    with Jail(packages=["numpy"]) as first, Jail(packages=["numpy"]) as second:
        draw = [["numpy.random.rand()"], ["numpy.loadtxt('/etc/passwd')"], ["open('/etc/passwd')"]]
        one, two = first.calls("import numpy", draw), second.calls("import numpy", draw)
    assert one == two and one[0].value and {each.status for each in one[1:]} == {"error"}
    with pytest.raises(GruppoError, match=r"a package cannot be imported .No module named 'nunpy'"):
        code_tests(packages="nunpy")

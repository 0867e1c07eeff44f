"""The contracts of the house, for parts of one's own: does this policy, engine or reward keep its promises?

    from gruppo import check_policy

    def test_my_policy():
        check_policy(MyPolicy(), ["1 + 1 =", "a longer prompt"])

Each check returns nothing, or raises ``ContractError`` with what was got, what is needed and where to mend it.
"""

from gruppo.testing.engine import check_engine
from gruppo.testing.policy import check_policy
from gruppo.testing.reward import check_reward
from gruppo.testing.shared import ContractError

__all__ = ["ContractError", "check_engine", "check_policy", "check_reward"]

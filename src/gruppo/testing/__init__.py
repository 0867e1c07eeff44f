"""Contract checks for your own components: does this policy, engine or reward behave as training
assumes?

    from gruppo import check_policy

    def test_my_policy():
        check_policy(MyPolicy(), ["1 + 1 =", "a longer prompt"])

Each check returns nothing, or raises ``ContractError`` with what was found, what is needed and how
to fix it.
"""

from gruppo.testing.policy import ContractError, check_engine, check_policy
from gruppo.testing.reward import check_reward

__all__ = ["ContractError", "check_engine", "check_policy", "check_reward"]

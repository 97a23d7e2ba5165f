"""The names of the policies that choose what a retrieval cache keeps, for those who only name one:
the policies themselves need torch.
"""

POLICY_NAMES = ("static", "window", "accumulated", "mean-key", "mass")

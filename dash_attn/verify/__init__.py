"""The checks that a Program must pass before it runs."""

from dash_attn.verify.checks import Placed, TooFewWorkers, Verified, VerifyError, verify
from dash_attn.verify.matching import matches

__all__ = ["Placed", "TooFewWorkers", "Verified", "VerifyError", "matches", "verify"]

"""The checks that a Program must pass before it runs."""

from dash_attn.verify.checks import Placed, Verified, verify
from dash_attn.verify.errors import TooFewWorkers, VerifyError, require_workers
from dash_attn.verify.matching import matches

__all__ = ["Placed", "TooFewWorkers", "Verified", "VerifyError", "matches", "require_workers", "verify"]

"""Checks that stand between a program and its launch."""

from dash_attn.verify.verify import Verified, VerifyError, verify

__all__ = ["Verified", "VerifyError", "verify"]

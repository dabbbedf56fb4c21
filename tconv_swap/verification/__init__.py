"""Verifies that a swapped network computes what the original computes."""

from tconv_swap.verification.report import Check, VerifyReport
from tconv_swap.verification.verify import verify

__all__ = ["Check", "VerifyReport", "verify"]

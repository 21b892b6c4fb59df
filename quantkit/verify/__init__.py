"""Reading an artifact again, with nothing from the run that wrote it, and judging it."""

from quantkit.verify.run import require_verified, verify
from quantkit.verify.verdict import Check, Failure, Verdict

__all__ = ["Check", "Failure", "Verdict", "require_verified", "verify"]

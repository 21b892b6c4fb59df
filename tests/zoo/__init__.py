"""Tiny random checkpoints of many architectures, and independent readers to judge artifacts by."""

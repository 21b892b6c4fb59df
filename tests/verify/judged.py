"""What tests of verification ask of a verdict."""

from __future__ import annotations

from pathlib import Path

from quantkit.verify import Verdict, verify
from verify.damage import Row, damaged

CHECKS = (
    *("headers", "index", "config", "names", "packed", "shapes", "dtypes", "codes", "scales", "zero-points"),
    *("siblings", "weights", "untouched", "accounted", "kv-scales", "files"),
)


def require_right(path: Path, source: Path | None, *, nothing: set[str]) -> None:
    """Assert that nothing is wrong, and that only the checks in `nothing` looked at nothing, and say why."""
    verdict = verify(path, source)

    assert verdict.ok, "\n".join(verdict.summary())
    assert tuple(check.id for check in verdict.checks) == CHECKS
    assert {check.id for check in verdict.checks if not check.looked} == nothing
    assert all(check.note for check in verdict.checks if not check.looked)
    assert verdict.line() == f"verified: {len(CHECKS) - len(nothing)} checks, nothing wrong"


def require_found(artifact: Path, source: Path | None, tmp_path: Path, row: Row) -> Verdict:
    """Assert that the damage of a row fails exactly its checks, with a failure that names the place and says why."""
    verdict = verify(damaged(artifact, tmp_path, row), source)

    failures = [(check.id, each.name, each.problem) for check in verdict.failed for each in check.failures]
    assert {check.id for check in verdict.failed} == set(row.checks.split()), failures
    assert any(name == row.name and row.words in problem for _, name, problem in failures), failures
    assert all(each.remedy for check in verdict.failed for each in check.failures), failures
    summary = verdict.summary()
    for check in verdict.failed:
        assert all(f"      {each.name}: {each.problem}" in summary for each in check.failures[:5])
    assert verdict.line().endswith(f"and wrong are {', '.join(check.id for check in verdict.failed)}")
    return verdict

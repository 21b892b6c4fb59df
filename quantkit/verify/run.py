"""Looking at an artifact from outside in, and the verdict."""

from __future__ import annotations

from pathlib import Path

from quantkit.checkpoint.hub import resolve_model
from quantkit.checkpoint.locate import read_json_object
from quantkit.checkpoint.reader import CONFIG_FILE
from quantkit.errors import CheckpointError
from quantkit.events import Emit, ignore
from quantkit.verify.cache import look_at_cache, stored_scales
from quantkit.verify.container import look_at_config, look_at_headers, require_checkpoint
from quantkit.verify.content import look_at_content
from quantkit.verify.files import look_at_files
from quantkit.verify.structure import look_at_names, look_at_packed, look_at_shapes, look_at_siblings
from quantkit.verify.subject import Subject
from quantkit.verify.verdict import CHECKS, Check, Verdict
from quantkit.weights import WeightSource

# what the options of a run can ask for although an engine or a user may not like it; the run says so itself
_CHOSEN = ("siblings", "weights")


def verify(
    path: str | Path, against: str | Path | None = None, *, trust_remote_code: bool = False, emit: Emit = ignore
) -> Verdict:
    """Read an artifact with nothing from the run that wrote it but its list of folds and digests, and judge it.

    One tensor is in memory at a time.

    Args:
        against: the checkpoint it was made from.
        trust_remote_code: run modelling code that comes with the artifact.
        emit: told which tensor is read.

    Raises:
        CheckpointError: `path` is no checkpoint at all, or `against` cannot be read.
        UsageError: there is no such directory.
    """
    artifact = resolve_model(str(path), emit=emit)
    require_checkpoint(artifact)
    reference = None if against is None else WeightSource.open(resolve_model(str(against), emit=emit))
    checks = {name: Check(name) for name in CHECKS}
    _look(artifact, reference, checks, trust_remote_code, emit)
    for check in checks.values():
        if check.status == "nothing" and not check.note:
            check.note = "not reached" if any(each.failures for each in checks.values()) else "nothing of the kind"
    return Verdict(str(path), None if against is None else str(against), tuple(checks.values()))


def require_verified(path: str | Path, against: str | Path, *, trust_remote_code: bool = False) -> Verdict:
    """Verify what a run has just written.

    Raises:
        CheckpointError: a check failed that no option of a run can ask for.
    """
    verdict = verify(path, against, trust_remote_code=trust_remote_code)
    if wrong := [check for check in verdict.failed if check.id not in _CHOSEN]:
        failure = wrong[0].failures[0]
        count = sum(len(check.failures) for check in wrong)
        raise CheckpointError(
            f"what was written failed its verification ({', '.join(check.id for check in wrong)}): {count} wrong, such"
            f" as `{failure.name}`, which {failure.problem}",
            "this may be a bug in quantkit, or a disk or memory that fails; nothing was kept",
        )
    return verdict


def _look(
    path: Path, reference: WeightSource | None, checks: dict[str, Check], trust_remote_code: bool, emit: Emit
) -> None:
    """Fill the checks, as far as each lets the next begin."""
    look_at_headers(path, checks["headers"], checks["index"])
    try:
        config = read_json_object(path / CONFIG_FILE)
    except CheckpointError as error:
        checks["config"].fail(CONFIG_FILE, error.message, error.hint)
        config = {}
    record = look_at_files(path, config, reference.checkpoint.path if reference else None, checks["files"])
    if checks["headers"].failures or checks["index"].failures or not config:
        return
    look_at_config(config, reference.checkpoint.config if reference else None, checks["config"])
    try:
        source = WeightSource.open(path)
    except CheckpointError as error:
        checks["config"].fail(CONFIG_FILE, error.message, error.hint)
        return
    try:
        subject = Subject.open(source, reference, record, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        checks["names"].fail(path.name, error.message, error.hint)
        return
    look_at_names(subject, checks["names"])
    look_at_packed(subject, len(stored_scales(subject)), checks["packed"])
    readable = look_at_shapes(subject, checks["shapes"], checks["dtypes"])
    look_at_siblings(subject, checks["siblings"])
    look_at_content(subject, readable, checks, emit)
    look_at_cache(subject, checks["kv-scales"])

"""The model card of an artifact: README.md with the metadata block of the Hugging Face hub. Pure functions."""

from __future__ import annotations

import re
from typing import Any

from quantkit.report.results import REPORT_HTML, Result, verdict

BASE_CARD = "README.base.md"  # the card of the source, where it has one
_FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*(\n|\Z)", re.DOTALL)
_TAKEN = ("license", "license_name", "license_link", "language", "pipeline_tag")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_SERVE = {
    "compressed-tensors": "vllm serve .",
    "gptq": "vllm serve .",
    "awq": "vllm serve .",
    "modelopt": "vllm serve .",
}


def model_card(result: Result, base_card: str = "", model: str = "") -> str:
    """Write README.md.

    Args:
        base_card: the source's README.md, whose licence, language and task hold for the artifact, too.
        model: the source as it was named; on the hub only where it is OWNER/NAME.
    """
    import yaml

    record = result.record
    recipe = record.get("recipe", {})
    method, bits = str(recipe.get("method", "")), recipe.get("bits")
    metadata = _metadata(base_card)
    if _HUB_NAME.fullmatch(model):
        metadata |= {"base_model": model, "base_model_relation": "quantized"}
    metadata |= {"library_name": "transformers", "tags": ["quantkit", method, str(record.get("format", ""))]}
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True, width=1000)
    source = str(record.get("source", {}).get("name", "its source"))
    lines = [
        f"---\n{front}---\n",
        f"# {_inline(result.name)}\n",
        f"{_inline(source)}, its linear layers in {bits} bits by {method}, group size {recipe.get('group_size')}.\n",
        f"{_inline(verdict(result))}\n",
        *_figures(result),
        "## Serve it\n",
        "```bash",
        _SERVE.get(str(record.get("format")), "vllm serve ."),
        "```\n",
        f"How it was made is in `quantkit-recipe.yaml` and `quantkit.json`; how it was measured, in `{REPORT_HTML}`.",
    ]
    if base_card:
        lines.append(f"The card of the model it was made of is in `{BASE_CARD}`.")
    return "\n".join(lines) + "\n"


def _figures(result: Result) -> list[str]:
    measured = result.measured
    if not measured:
        return []
    rows = [
        ("perplexity", measured["perplexity_reference"], measured["perplexity"], ".3f"),
        ("KL divergence, nats per token", None, measured["kl"]["mean"], ".4g"),
        ("same most likely token", None, measured["kl"]["top1"], ".2%"),
        ("bytes", *result.sizes, ",.0f"),
    ]
    said = [f"Over {measured['tokens']:,} tokens of {_inline(str(measured['data']))}.\n"]
    cells = [(name, *("" if v is None else format(v, form) for v in (a, b))) for name, a, b, form in rows]
    return ["| | before | after |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells), "", *said]


def _metadata(card: str) -> dict[str, Any]:
    """What an artifact takes over from the metadata block of its source."""
    import yaml

    found = _FRONT.match(card)
    try:
        values = yaml.safe_load(found[1]) if found else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {key: values[key] for key in _TAKEN if key in values} if isinstance(values, dict) else {}


def _inline(text: str) -> str:
    """A text that Markdown and HTML leave as it is: names are hostile until proved otherwise."""
    return re.sub(r"([\\`*_\[\]<>|#&!])", r"\\\1", " ".join(text.split()))

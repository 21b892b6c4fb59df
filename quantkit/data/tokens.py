"""Text to token rows, as the tokenizer would serve it: the template, BOS exactly once, windows, never padding.

The only file in data/ that may import `transformers`. Letters: S samples (rows), T_i tokens of row i, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantkit.data.account import Draw, notes_of, report_of
from quantkit.data.corpus import Corpus, Document, by_reason
from quantkit.errors import CheckpointError, UsageError
from quantkit.events import Emit, Note, ignore

# a transformers.PreTrainedTokenizerBase; naming the type here would import transformers
Tokenizer = Any

BETWEEN = "\n\n"  # what joins documents into running text
SPARE = 1.3  # windows tokenized per window asked for, so that the choice among them is random
MARGIN = 64  # tokens past the cut that keep a joined prefix's last tokens equal to those of the whole text
_REMEDY = "copy the model's tokenizer.json, or tokenizer.model, and tokenizer_config.json into that folder"
# what from_pretrained raises over missing, cut or foreign files
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, RecursionError)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Token rows to calibrate on; no row is padded.

    Attributes:
        rows: int64 [T_i] each, 2 <= T_i <= seq_len.
        special: a sentence: which special tokens the rows begin with, and why.
        report: JSON values: source, kind, rows_read, usable, bad, empty, truncated, dropped (each with count, up to
            20 line numbers, reasons), rows_used, tokens, tokens_min, tokens_median, tokens_max, seq_len, samples,
            seed, special, partial, digest (of the documents), tokens_digest (of the rows).
    """

    rows: tuple[Tensor, ...]
    special: str
    report: dict[str, Any]


class _Unfit(Exception):
    """A document that this tokenizer cannot turn into tokens; carries the reason."""


class _NamedFailure(AbstractContextManager[None]):
    """Turns whatever a tokenizer's files make from_pretrained raise into an error that names the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # a context manager, because `tokenizers` raises Exception itself, which an except clause could not tell
        # from its subclasses
        if error is None or not (kind is Exception or isinstance(error, _BROKEN)):
            return
        cause = (" ".join(str(error).split()) or type(error).__name__)[:300]
        trust = "trust_remote_code" in str(error)
        hint = "read the code in that folder; if you trust it, allow remote code" if trust else _REMEDY
        raise CheckpointError(f"the tokenizer in `{self.path}` cannot be loaded: {cause}", hint) from error


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a local checkpoint; never reaches for the network.

    Raises:
        CheckpointError: there is no tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise CheckpointError(f"`{path}` is not a folder, so it holds no tokenizer", "name the checkpoint's folder")
    with _NamedFailure(path):
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust_remote_code)
    if not _encode(tokenizer, "Hello"):
        # transformers builds some tokenizer classes without their files: three special tokens and no words
        raise CheckpointError(f"the tokenizer in `{path}` has no vocabulary ({len(tokenizer)} tokens)", _REMEDY)
    return tokenizer


def serving_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Find the tokens that the tokenizer puts before a text when it serves: (BOS,), usually, or none.

    Judged by what it does, not by its settings, which disagree with it in published checkpoints.
    """
    bos = tokenizer.bos_token_id
    for sample in ("Hello", "a", "1"):
        served = list(tokenizer(sample)["input_ids"])
        plain = _encode(tokenizer, sample)
        for start in range(len(served) - len(plain) + 1) if plain else ():
            if served[start : start + len(plain)] == plain:
                return tuple(served[:start])
    return (bos,) if bos is not None and served[:1] == [bos] else ()


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, *, samples: int, seq_len: int, seed: int, emit: Emit = ignore
) -> TokenRows:
    """Choose `samples` rows of at most `seq_len` tokens.

    Running text is cut into consecutive windows, of which `samples` are chosen at random and kept in text order;
    rows are shuffled, and the first `samples` usable ones are taken. Same corpus, tokenizer and seed, same rows.

    Args:
        seq_len: longest row, special tokens included.
        emit: told when there are fewer rows than asked for, or when the source was not read to its end.

    Raises:
        UsageError: no row is usable, the sizes are none, or messages meet a tokenizer without a template.
    """
    prefix = serving_prefix(tokenizer)
    if samples < 1:
        raise UsageError(f"{samples} calibration samples were asked for", "ask for at least 1")
    if seq_len < len(prefix) + 2:
        raise UsageError(f"rows of {seq_len} tokens are too short to calibrate on", f"use at least {len(prefix) + 2}")
    draw = (_draw_windows if corpus.stream else _draw_rows)(corpus, tokenizer, prefix, samples, seq_len, seed)
    if not draw.rows:
        reasons = "; ".join(f"{len(lines)} x {reason}" for reason, lines in by_reason(draw.dropped).items())
        message = f"none of the {len(corpus.documents)} documents of `{corpus.source}` gives a row of 2 tokens"
        raise UsageError(f"{message}: {reasons}" if reasons else message, "name a source with more text")
    special = _special(corpus, tokenizer, prefix)
    settings = {"samples": samples, "seq_len": seq_len, "seed": seed, "special": special}
    report = report_of(corpus, draw) | settings
    for message in notes_of(corpus, draw, report):
        emit(Note(message))
    return TokenRows(tuple(torch.tensor(row, dtype=torch.int64) for row in draw.rows), special, report)


def evaluation_ids(corpus: Corpus, tokenizer: Tokenizer, *, max_tokens: int | None) -> Tensor:
    """Tokenize a whole corpus in order, without special tokens; a blank line joins texts.

    Args:
        max_tokens: keep that many from the start; None keeps all.

    Returns:
        int64 [T], T >= 2.

    Raises:
        UsageError: fewer than 2 tokens, or a document the tokenizer cannot read.
    """
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(f"{max_tokens} evaluation tokens were asked for", "ask for at least 2")
    if all(document.text is not None for document in corpus.documents):
        ids, _ = _running(corpus.documents, tokenizer, None if max_tokens is None else max_tokens + MARGIN)
    else:
        ids = []
        for document in corpus.documents:
            try:
                ids += _document_ids(document, tokenizer, ())
            except _Unfit as error:
                raise UsageError(f"line {document.line} of `{corpus.source}`: {error}", "correct the line") from error
            if max_tokens is not None and len(ids) >= max_tokens:
                break
    if len(ids) < 2:
        raise UsageError(f"`{corpus.source}` holds {len(ids)} tokens", "name a source with more text")
    return torch.tensor(ids[:max_tokens], dtype=torch.int64)


def text_shares(corpus: Corpus, tokenizer: Tokenizer, count: int) -> tuple[Tensor, Tensor] | None:
    """How much text stands behind each of the first `count` tokens of `evaluation_ids`.

    A token owns the text from the end of the token before it to its own end, so that every character of the text
    belongs to one token: blanks that a tokenizer counts to neither go to the later one, and a character that several
    tokens spell goes to the first.

    Returns:
        UTF-8 bytes, and words that begin in it (runs of characters that are no whitespace), int64 [count] each. None
        where this is not known: the documents are not all text, or the tokenizer does not tell where its tokens are.
    """
    if not getattr(tokenizer, "is_fast", False) or any(document.text is None for document in corpus.documents):
        return None
    _, text = _running(corpus.documents, tokenizer, count)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    sizes, words, done = [], [], 0
    for _, end in encoded["offset_mapping"][:count]:
        own = text[done:end]
        sizes.append(len(own.encode(errors="surrogatepass")))
        begins = len(own.split())
        if begins and done and not own[0].isspace() and not text[done - 1].isspace():
            begins -= 1  # the rest of a word that an earlier token began
        words.append(begins)
        done = max(done, end)
    return torch.tensor(sizes, dtype=torch.int64), torch.tensor(words, dtype=torch.int64)


def _draw_windows(
    corpus: Corpus, tokenizer: Tokenizer, prefix: tuple[int, ...], samples: int, seq_len: int, seed: int
) -> Draw:
    """Cut running text into windows of `seq_len`, each behind the prefix, and choose among the whole ones."""
    width = seq_len - len(prefix)
    need = math.ceil(samples * width * SPARE) if corpus.ranked else None
    ids, _ = _running(corpus.documents, tokenizer, need)
    whole, left = divmod(len(ids), width)
    chosen = list(range(whole))
    if whole > samples:
        chosen = sorted(random.Random(seed).sample(chosen, samples))
    elif whole < samples and left:
        chosen.append(whole)  # the ragged end, only where whole windows are too few
    rows = [[*prefix, *ids[k * width : (k + 1) * width]] for k in chosen]
    rows = [row for row in rows if len(row) >= 2]
    return Draw(rows, max(whole, len(rows)))


def _draw_rows(
    corpus: Corpus, tokenizer: Tokenizer, prefix: tuple[int, ...], samples: int, seq_len: int, seed: int
) -> Draw:
    """Shuffle the documents and take the first usable ones."""
    draw = Draw(available=len(corpus.documents))
    order = list(corpus.documents)
    random.Random(seed).shuffle(order)
    for document in order:
        if len(draw.rows) == samples:
            break
        try:
            ids = _document_ids(document, tokenizer, prefix)
        except _Unfit as error:
            draw.dropped.append((document.line, str(error)))
            continue
        if len(ids) < 2:
            draw.dropped.append((document.line, "fewer than 2 tokens"))
            continue
        if len(ids) > seq_len:
            draw.truncated.append((document.line, f"longer than {seq_len} tokens"))
        draw.rows.append(ids[:seq_len])
    return draw


def _document_ids(document: Document, tokenizer: Tokenizer, prefix: tuple[int, ...]) -> list[int]:
    """Tokenize one document; only text gets the prefix: a template writes its own, and tokens are taken as given."""
    if document.input_ids is not None:
        outside = next((token for token in document.input_ids if token >= len(tokenizer)), None)
        if outside is not None:
            raise _Unfit(f"a token outside the vocabulary of {len(tokenizer)}")
        return list(document.input_ids)
    if document.messages is not None:
        return _chat_ids(document.messages, tokenizer)
    text = document.text if document.text is not None else f"{document.prompt}{document.completion}"
    ids = _encode(tokenizer, text)
    return ids if prefix and ids[: len(prefix)] == list(prefix) else [*prefix, *ids]  # some texts spell BOS out


def _chat_ids(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[int]:
    """Write a conversation with the model's own template, which brings its BOS along."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"the tokenizer `{tokenizer.name_or_path}` has no chat template, but the calibration data holds messages",
            "use data with `text`, or the tokenizer of the instruction-tuned model",
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        # templates refuse by raising; those written for strings trip over lists of parts in Python's own ways
        raise _Unfit("refused by the chat template") from error
    return _encode(tokenizer, text)


def _running(documents: Sequence[Document], tokenizer: Tokenizer, need: int | None) -> tuple[list[int], str]:
    """Tokenize documents as one text in one call: cutting it first would change the tokens at the cuts.

    Args:
        need: stop at the end of the document that brings that many tokens; None takes them all.

    Returns:
        The tokens and the text that they are of.
    """
    texts = [document.text or "" for document in documents]
    taken = len(texts) if need is None else _reach(texts, 4 * need)
    while True:
        text = BETWEEN.join(texts[:taken])
        ids = _encode(tokenizer, text)
        if need is None or len(ids) >= need or taken == len(texts):
            return ids, text
        taken = max(taken + 1, _reach(texts, 2 * sum(map(len, texts[:taken]))))


def _reach(texts: Sequence[str], characters: int) -> int:
    """Number of leading texts that together hold `characters`, or all of them."""
    held = 0
    for count, text in enumerate(texts, 1):
        held += len(text)
        if held >= characters:
            return count
    return len(texts)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    # verbose=False: a long text is cut into windows, so its length needs no warning
    return list(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def _special(corpus: Corpus, tokenizer: Tokenizer, prefix: tuple[int, ...]) -> str:
    """Say in a sentence which special tokens the rows begin with."""
    kinds = {"messages" if d.messages else "input_ids" if d.input_ids else "text" for d in corpus.documents}
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in prefix)
    text = f"each row begins with {named}, as when serving" if prefix else "no BOS: this tokenizer adds none"
    said = {"text": text, "messages": "messages: as the chat template writes them", "input_ids": "tokens: as given"}
    return "; ".join(sentence for kind, sentence in said.items() if kind in kinds)

"""Score windows of tokens with vLLM: python vllm_client.py CHECKPOINT WINDOWS.json RESULT.json [DTYPE]"""

from __future__ import annotations

import json
import sys


def main() -> None:
    checkpoint, windows, result = sys.argv[1:4]
    from vllm import LLM, SamplingParams

    with open(windows, encoding="utf-8") as stream:
        tokens = json.load(stream)
    llm = LLM(
        model=checkpoint,
        dtype=sys.argv[4] if len(sys.argv) > 4 else "float16",
        max_model_len=512,
        enforce_eager=True,
        max_num_seqs=len(tokens),
    )
    answers = llm.generate(
        [{"prompt_token_ids": window} for window in tokens],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    scored = [
        [answer.prompt_logprobs[at][window[at]].logprob for at in range(1, len(window))]
        for answer, window in zip(answers, tokens, strict=True)
    ]
    with open(result, "w", encoding="utf-8") as stream:
        json.dump(scored, stream)


if __name__ == "__main__":
    main()

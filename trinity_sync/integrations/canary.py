"""Canaries: the log-probability of a few prompts, asked of an engine after an update.

The trainer records it with the version; the engine has to give the same. It shows what a comparison
of values cannot: an adapter that was not merged before the weights were published, or an engine
that computes something else with the right weights.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trinity_sync.errors import WeightSyncError

Score = Callable[[list[int]], Sequence[float]]
"""Takes the tokens of a prompt; returns the log-probability of each after the first, in nats."""
THRESHOLD = 0.03
"""In nats, for prompts of 128 tokens: a model in bfloat16 was 0.014 from the same in float32."""


def take_canary(score: Score, prompts: Sequence[list[int]]) -> dict[str, float]:
    """Score prompts under a version, to pass to `record_metrics` before its `upload` or `save`.

    Args:
        score: of the trainer's model, such as `score_model` of it.
        prompts: the tokens of some texts, each of 128 or more.

    Returns:
        The mean log-probability of each prompt's tokens after the first, in nats, by metric.
    """
    scores = [score(prompt) for prompt in prompts]
    return {f"canary_{number}": sum(each) / len(each) for number, each in enumerate(scores)}


def check_canary(
    metrics: Mapping[str, float],
    score: Score,
    prompts: Sequence[list[int]],
    *,
    threshold: float = THRESHOLD,
) -> float:
    """Score the prompts in an engine, and compare them with the version that it serves.

    Args:
        metrics: of the version's step: ``Checkpoints(root).metrics(step)``.
        score: of the engine: `score_llm` or `score_server` of it.
        prompts: those of `take_canary`.
        threshold: greatest difference of a prompt's mean log-probability, in nats.

    Returns:
        The greatest difference.

    Raises:
        WeightSyncError: a difference is greater, or the step has no canary.
    """
    found = take_canary(score, prompts)
    if missing := sorted(found.keys() - metrics.keys()):
        raise WeightSyncError(
            f"the version has no {missing[0]}; record take_canary of the same prompts before upload"
        )
    for name, value in found.items():
        if not abs(value - metrics[name]) <= threshold:  # NaN as well
            raise WeightSyncError(
                f"the engine does not serve what was trained: {name} has a mean log-probability of "
                f"{value:.4f} in it, and of {metrics[name]:.4f} in the trainer. Discard its "
                "answers since this update; were adapters merged before the weights were published?"
            )
    return max(abs(value - metrics[name]) for name, value in found.items())


def score_model(model: Any) -> Score:
    """Return the score of a model of transformers."""
    import torch

    @torch.inference_mode()
    def score(prompt: list[int]) -> list[float]:
        tokens = torch.tensor([prompt], device=model.device)
        every = model(tokens).logits[0, :-1].float().log_softmax(-1)
        found: list[float] = every.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return found

    return score


def score_llm(llm: Any) -> Score:
    """Return the score of vLLM's ``LLM`` in this process."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def score(prompt: list[int]) -> list[float]:
        [answer] = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        scored = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
        return [each[token].logprob for token, each in scored]

    return score


def score_server(url: str, model: str, *, api_key: str = "", timeout_s: float = 60.0) -> Score:
    """Return the score of a model or an adapter behind vLLM's OpenAI-compatible server."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    def score(prompt: list[int]) -> list[float]:
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0}
        try:
            answer = client.post("/v1/completions", json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise WeightSyncError(f"{url} scored no prompt: {error!r}; does it serve?") from error
        try:
            found = answer.json()["choices"][0]["prompt_logprobs"]
            scored = zip(prompt[1:], found[1:], strict=True)
            return [float(each[str(token)]["logprob"]) for token, each in scored]
        except (TypeError, ValueError, LookupError) as error:
            raise WeightSyncError(
                f"{url} returned no log-probability of each token of a prompt ({error!r}); is what "
                f"{model} computes finite, and does the server return prompt_logprobs?"
            ) from error

    return score

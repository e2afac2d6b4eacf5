"""What vLLM and SGLang servers answer: samples of a causal model with the weights that were pushed, and their scores.

``mode`` selects the log-probabilities: ``"raw"`` at temperature 1, ``"processed"`` after temperature, top_p, and top_k,
``"temperature"`` only after temperature.
"""

import torch

from sglang_engine import Server


def draw(model, weights, prompt, max_tokens, words, mode):
    """Returns tokens, their log-probabilities, and the five largest at each token."""
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
    generator = torch.Generator().manual_seed(words["seed"])
    tokens, log_probs, largest = [], [], []
    while len(tokens) < max_tokens and (not tokens or tokens[-1] not in words["stop_token_ids"]):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
        scaled = (logits / words["temperature"]).log_softmax(-1)
        cut = truncate(scaled, words.get("top_k", 0), words.get("top_p", 1.0)).log_softmax(-1)
        token = int(torch.multinomial(cut.exp(), 1, generator=generator))
        scores = {"raw": logits.log_softmax(-1), "processed": cut, "temperature": scaled}[mode]
        tokens.append(token)
        log_probs.append(float(scores[token]))
        largest.append(scores.topk(5).values.tolist())
    return tokens, log_probs, largest


def truncate(log_probs, top_k, top_p):
    values, order = log_probs.sort(descending=True)
    kept = torch.arange(len(values)) < (top_k or len(values))
    kept &= values.exp().cumsum(-1) - values.exp() < top_p
    return torch.full_like(log_probs, -torch.inf).index_copy(0, order[kept], values[kept])


def complete(values, model, mode):
    """Answers vLLM's completion requests with the weights that ``values()`` returns, and notes who is asked."""

    def answer(body):
        answer.names.append(body["model"])
        tokens, log_probs, largest = draw(model, values(), body["prompt"], body["max_tokens"], body, mode)
        top = [{str(place): value for place, value in enumerate(row)} for row in largest]
        return {"token_ids": tokens, "logprobs": {"token_logprobs": log_probs, "top_logprobs": top}}

    answer.names = []
    return answer


class SamplingServer(Server):
    """An SGLang that samples."""

    def __init__(self, model, mode):
        super().__init__({name: param.shape for name, param in model.named_parameters()})
        self.model, self.mode_of_scores = model, mode

    def on_generate(self, body):
        words = body["sampling_params"]
        words["seed"] = words["sampling_seed"]
        self.generate()
        found = draw(
            self.model, self.weights[0], body["input_ids"], words["max_new_tokens"], words, self.mode_of_scores
        )
        rows = [[log_prob, token, None] for token, log_prob in zip(*found[:2], strict=True)]
        top = [[[value, 0, None] for value in row] for row in found[2]]
        return {"meta_info": {"output_token_logprobs": rows, "output_top_logprobs": top}}

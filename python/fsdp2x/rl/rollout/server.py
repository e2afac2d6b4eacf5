"""``RolloutServer``: an engine process that samples for trainers and takes their weights between two tokens.

It has two sockets on this host. ``address`` is for requests, and ``weights_address(address)`` for pushes of
``fsdp2x.sync.Peer``. Frames are those of ``fsdp2x.sync.engine``: a head and JSON, without pickles. Each request
has one answer:

    status  {}                             -> {ok, state, version, reason, pid, vocab_size, has_weights, ...}
    sample  {prompts, <Sampling's fields>} -> {ok, completions: [[prompt, tokens, log_probs, spans, admitted, text],
                                               ...], prompts: [token ids, ...]}
    digests {}                             -> {ok, digests: {parameter: [dtype, shape, SHA-256 of its values]}}

An answer repeats the ``id`` of its request, because answers come in the order in which requests complete. Prompts may
have ``numbers``, the indices for their random numbers. An answer that is not ``ok`` has the status and the text of the
``error``. Torn weights are an error. One thread does everything. The requests of all trainers run in one batch. New
ones and pushes are taken between two tokens, so each waits for at most one token of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp2x.io.hf.layout import bars_of_rank_0
from fsdp2x.rl.rollout.batch import MAX_BATCH_ROWS, MAX_BATCH_TOKENS, Batch, Request
from fsdp2x.rl.rollout.dispatch import ANSWER
from fsdp2x.rl.rollout.sampling import FIELDS, Sampling, Version
from fsdp2x.rl.rollout.text import Prompt, prompt_ids
from fsdp2x.rl.sync.receiver.engine import (
    Receiver,
    WireError,
    bind_address,
    close_files,
    peer_uid,
    receive_frame,
    send_frame,
)
from fsdp2x.rl.sync.receiver.engine_adapter import LoraParameters

# Seconds for a trainer to send the rest of a request, or to read its answer.
_FRAME_S = 60.0


def weights_address(address: str) -> str:
    """Returns where the engine that samples at ``address`` takes weights."""
    return f"{address}.weights"


class RolloutServer:
    """Serves requests and pushes at two sockets. Do not use ``model`` while it serves.

    A context manager that closes itself.
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        *,
        has_weights: bool = True,
        push_timeout_s: float = 300.0,
        stop_ids: Sequence[int] = (),
        max_batch_rows: int = MAX_BATCH_ROWS,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        tokenizer: Any | None = None,
    ) -> None:
        """Opens the sockets.

        Args:
            model: an unsharded transformers model with a language-model head.
            address: "@name", which leaves no file, or the path of a socket, which must not exist.
            has_weights: whether the model has weights. If not, it does not sample before the first push.
            push_timeout_s: seconds to wait for a trainer's next message in a push.
            stop_ids: tokens that end a response if a request names none.
            max_batch_rows, max_batch_tokens: see ``sample``.
            tokenizer: a transformers tokenizer, for prompts that are text or messages, and for answers as text.

        Raises:
            OSError: an address is taken or invalid.
            ValueError: an address is empty, or a limit is below 1.
        """
        if not address.removeprefix("@"):
            raise ValueError(f"RolloutServer: expected @name or the path of a socket as address, got {address!r}")
        self._model, self._address, self._has_weights = model.eval(), address, has_weights
        self._batch = Batch(self._model, self._weights, max_rows=max_batch_rows, max_tokens=max_batch_tokens)
        self._stop_ids, self._tokenizer = tuple(stop_ids), tokenizer
        self._requests: dict[Request, tuple[socket.socket, dict[str, Any]]] = {}  # and the beginning of their answers
        self._connections: list[socket.socket] = []
        self._num_visits = 0
        self._committed_s: float | None = None  # time of the last commit, by the host's monotonic clock
        sink = LoraParameters(model, has_weights=has_weights)
        self._receiver = Receiver(weights_address(address), sink, timeout_s=push_timeout_s)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(bind_address(address))
        except BaseException:
            self._listener.close()
            self._receiver.close()
            raise
        self._listener.listen()

    def __enter__(self) -> RolloutServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections and sockets."""
        self._receiver.close()
        for connection in (self._listener, *self._connections):
            connection.close()
        self._connections = []
        if not self._address.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)

    def serve(self, *, contact_s: float | None = None) -> None:
        """Answers trainers.

        Args:
            contact_s: seconds to wait for a first trainer. Then it ends when all trainers have left. None: it never
                ends.
        """
        began = time.monotonic()
        while True:
            waiting = [self._listener, *self._connections, *self._receiver.sockets]
            ready, _, _ = select.select(waiting, [], [], 1.0 if self._batch.is_idle else 0.0)
            self._take_push()
            if self._listener in ready:
                self._accept()
            for connection in [connection for connection in self._connections if connection in ready]:
                self._read(connection)
            if not self._batch.is_idle:
                self._step()
            if contact_s is not None and not self._connections and not select.select([self._listener], [], [], 0)[0]:
                if self._num_visits or time.monotonic() - began > contact_s:
                    return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if peer_uid(connection) == os.getuid():
            self._connections.append(connection)
            self._num_visits += 1
        else:
            connection.close()

    def _read(self, connection: socket.socket) -> None:
        """Takes one request. Disconnects a trainer that has left or does not use this protocol."""
        try:
            kind, body, files = receive_frame(connection, time.monotonic() + _FRAME_S)
            close_files(files)
        except WireError:
            return self._let_go(connection)
        head = {"id": body.pop("id")} if "id" in body else {}
        try:
            if kind == "status":
                self._answer(connection, {**head, "ok": True, **self._status()})
            elif kind == "digests":
                self._answer(connection, {**head, "ok": True, "digests": self._digests()})
            elif kind == "sample":
                self._requests[self._take_up(body)] = connection, head
            else:
                raise ValueError(f"unknown request {kind!r}, expected 'status', 'digests' or 'sample'")
        except Exception as error:
            self._refuse(connection, head, error)
        self._finish([request for request in self._requests if not request.num_open])  # requests without prompts

    def _refuse(self, connection: socket.socket, head: dict[str, Any], error: Exception) -> None:
        said = f"{type(error).__name__}: {error}"
        self._answer(connection, {**self._receiver.status, **head, "ok": False, "error": said})

    def _answer(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        try:
            send_frame(connection, ANSWER, answer, time.monotonic() + _FRAME_S)
        except WireError:
            self._let_go(connection)

    def _let_go(self, connection: socket.socket) -> None:
        connection.close()
        if connection in self._connections:
            self._connections.remove(connection)
        for request in [request for request, (trainer, _) in self._requests.items() if trainer is connection]:
            self._batch.drop(request)
            del self._requests[request]

    def _step(self) -> None:
        """Draws one token of each response."""
        try:
            done = self._batch.step()
        except Exception as error:
            failed, self._requests = self._requests, {}
            self._batch.clear()
            for connection, head in failed.values():
                self._refuse(connection, head, error)
        else:
            self._finish(done)

    def _finish(self, complete: Sequence[Request]) -> None:
        for request in complete:
            if request in self._requests:  # unless its trainer has left
                connection, head = self._requests.pop(request)
                done = request.completions(self._tokenizer)
                found = [[c.prompt, c.tokens, c.log_probs, c.spans, c.admitted, c.text] for c in done]
                prompts = list({c.prompt: c.prompt_tokens for c in done}.values())
                self._answer(connection, {**head, "ok": True, "completions": found, "prompts": prompts})

    def _status(self) -> dict[str, Any]:
        vocab_size = self._model.config.get_text_config().vocab_size  # type: ignore[operator, union-attr]
        return {
            **self._receiver.status,
            "vocab_size": vocab_size,
            "has_weights": self._is_ready(),
            "has_tokenizer": self._tokenizer is not None,
            "stop_ids": self._stop_ids,
            "committed_s": self._committed_s,
        }

    def _digests(self) -> dict[str, list[Any]]:
        with self._weights():
            return {
                name: [str(param.dtype).removeprefix("torch."), list(param.shape), digest_of(param)]
                for name, param in self._model.named_parameters()
            }

    def _is_ready(self) -> bool:
        return self._has_weights or self._receiver.status["state"] != "initial"

    def _take_up(self, body: dict[str, Any]) -> Request:
        if not self._is_ready():
            raise RuntimeError("this engine was started without weights. Push before sampling.")
        numbers = body.pop("numbers", None)
        prompts, sampling = read_request(body)
        if numbers is not None and [type(number) for number in numbers] != [int] * len(prompts):
            raise ValueError(f"a request to sample: numbers must be one for each of {len(prompts)} prompts")
        if sampling.stop_ids is None:
            sampling = dataclasses.replace(sampling, stop_ids=self._stop_ids)
        return self._batch.add(prompt_ids(self._tokenizer, prompts), sampling, numbers)

    def _take_push(self) -> None:
        if self._receiver.poll() is not None:
            self._committed_s = time.monotonic()
            self._batch.forget_cache()  # also after another push of the same version

    @contextlib.contextmanager
    def _weights(self) -> Iterator[Version]:
        """Protects the weights for one forward. Takes a waiting push first."""
        self._take_push()
        with self._receiver.reading() as version:
            yield version


def digest_of(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of the values, bit by bit."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()


def read_request(body: dict[str, Any]) -> tuple[list[Prompt], Sampling]:
    """Returns prompts and settings of a request.

    Raises:
        ValueError: a field is missing or unknown.
        TypeError: a field has another type.
    """
    unknown = sorted(set(body) - {"prompts", *FIELDS})
    missing = sorted({"prompts", "max_tokens"} - set(body))
    if unknown or missing:
        raise ValueError(f"a request to sample: unknown {unknown}, missing {missing}. Expected prompts, {FIELDS}.")
    prompts = body["prompts"]
    if not isinstance(prompts, list) or not all(isinstance(prompt, list | str) for prompt in prompts):
        raise TypeError("a request to sample: prompts must be lists of token ids, texts or lists of messages")
    for prompt in prompts:
        if not isinstance(prompt, str) and not (
            all(type(part) is int for part in prompt) or all(isinstance(part, dict) for part in prompt)
        ):
            raise TypeError("a request to sample: token ids must be ints, and messages objects")
    settings = {name: value for name, value in body.items() if name in FIELDS}
    if not isinstance(stop_ids := settings.get("stop_ids"), list | None):
        raise TypeError(f"a request to sample: stop_ids must be a list or null, got {stop_ids!r}")
    settings["stop_ids"] = None if stop_ids is None else tuple(stop_ids)
    return prompts, Sampling(**settings)


def load_model(path: str, *, dtype: torch.dtype, device: str) -> tuple[nn.Module, bool]:
    """Loads the model of an engine, and returns whether it has weights: not if there is only a ``config.json``.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        ValueError: transformers cannot make such a model, or not on that device.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if not os.path.exists(path):
        raise FileNotFoundError(f"no model at {path!r}. Pass a folder with config.json and weights, or config.json.")
    names = os.listdir(path) if os.path.isdir(path) else []
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    try:
        if has_weights:
            with bars_of_rank_0():
                model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        else:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            if "generation_config.json" in names:
                model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        return model.to(device).eval(), has_weights
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"cannot make a model of {path!r} on {device}: {said}") from None


def stop_ids_of(model: nn.Module) -> tuple[int, ...]:
    """Returns the tokens that end a response by the model's generation config."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)

"""Checks of a started SGLang: its server's settings, and the room for the longest row."""

from collections.abc import Iterator, Mapping, Sequence

from streamppo.errors import ModelError
from streamppo.rollout.sglang.link import Answer


def check_strings(info: Mapping[str, Answer], strings: Sequence[str]) -> None:
    """Raise `ModelError` if a server must search for stop `strings` and has no tokenizer."""
    if strings and info.get("skip_tokenizer_init"):
        raise ModelError(
            f"rollout.stop has the string {strings[0]!r}, which a server finds by its tokenizer: start it without "
            "--skip-tokenizer-init, or stop only at names of tokens"
        )


def check_server(info: Mapping[str, Answer], url: str) -> None:
    """Raise `ModelError` if the answer to /server_info is not SGLang's, or if the server has several replicas."""
    if not isinstance(info, dict) or not isinstance(info.get("version"), str) or "max_req_input_len" not in info:
        raise ModelError(
            f"{url} is no SGLang server: its /server_info has no version of SGLang and no max_req_input_len"
        )
    for name in ("dp_size", "pp_size"):
        if (size := info.get(name) or 1) > 1:
            raise ModelError(
                f"the SGLang server at {url} has {name} = {size}, with which it accepts no pushed weights: start "
                "one server for each replica (--tp-size N --base-gpu-id M), and name all of them in rollout.engine.urls"
            )


def differences(info: Mapping[str, Answer], learner: Mapping[str, object]) -> Iterator[str]:
    """Yield each setting of a server that makes its log-probs differ from those of a `learner` with these settings."""
    for name, required in learner.items():
        if info.get(name, required) not in (required, "auto"):
            yield f"{name} = {info[name]}, and the learner has {required}"


def longest(info: Mapping[str, Answer]) -> int:
    """Return the maximum number of tokens in a row. SGLang's `max_req_input_len` is 6 tokens less."""
    return int(info["max_req_input_len"]) + 6


def check_room(longest: int, room: int) -> None:
    """Raise `ModelError` if SGLang, whose rows have at most `longest` tokens, would truncate rows of `room` tokens."""
    if longest < room:
        raise ModelError(
            f"SGLang holds rows of at most {longest:,} tokens, and prompt and completion have up to {room:,}: set "
            "more memory for its cache (rollout.engine.mem_fraction_static or max_total_tokens, rollout.gpus), more "
            "context of a server (--context-length), or a smaller rollout.max_tokens or max_prompt_tokens"
        )


def check_routes(info: Mapping[str, Answer]) -> None:
    """Raise `ModelError` for a server that does not return experts."""
    if not info.get("enable_return_routed_experts"):
        raise ModelError("with rollout.engine.routes a server needs --enable-return-routed-experts")

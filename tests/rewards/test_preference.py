"""Models of what people prefer: a tiny CLIP, the calls to the other packages, and the errors
without them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from gruppo.core.images import to_uint8
from gruppo.rewards.preference import clip_score, pick_score
from gruppo.types import GruppoError

PIL = pytest.importorskip("PIL.Image")


def noise(seed: int, channels: int = 3) -> torch.Tensor:
    return torch.rand(channels, 20, 24, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> str:
    """A folder with a CLIP of random weights, 8 pixels a patch, and a tokenizer of letters."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    text = {
        "vocab_size": len(tokens),
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
    }
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.CLIPConfig(
        text_config=text | sizes | {"max_position_embeddings": 12},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer = transformers.CLIPTokenizer(
        vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), model_max_length=12
    )
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(**size)
    transformers.CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return str(folder)


def test_clip_score_is_the_cosine_of_each_image_and_its_caption(clip):
    import transformers

    images, captions = [noise(0), noise(1), noise(2)], ["a cat", "a dog", "a cat"]
    module = transformers.CLIPModel.from_pretrained(clip).eval()
    processor = transformers.CLIPProcessor.from_pretrained(clip)
    pil_images = [PIL.fromarray(to_uint8(image).permute(1, 2, 0).numpy()) for image in images]
    inputs = processor(text=captions, images=pil_images, return_tensors="pt", padding=True)
    with torch.no_grad():
        cosines = module(**inputs).logits_per_image.diagonal() / module.logit_scale.exp()
    scores = clip_score(clip)(images=images, prompts=captions)
    assert scores == pytest.approx(cosines.tolist(), abs=1e-5) and len(set(scores)) == 3


def test_long_captions_are_cut_grey_images_are_read_and_nan_is_unscored(clip):
    broken = noise(0)
    broken[0, 0, 0] = math.nan
    scores = clip_score(clip)(images=[noise(0, 1), broken], prompts=["word " * 40] * 2)
    assert math.isfinite(scores[0]) and math.isnan(scores[1])


def test_messages_are_captions_and_classes_are_refused(clip):
    reward = clip_score(clip)
    messages = [{"role": "user", "content": "a cat"}]
    assert reward(images=[noise(0)], prompts=[messages]) == reward(
        images=[noise(0)], prompts=["a cat"]
    )
    with pytest.raises(GruppoError, match=r"clip_score reads captions, and a prompt is 7 \(int\)"):
        reward(images=[noise(0)], prompts=[7])


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(
        GruppoError,
        match=r"pick_score: the CLIP model .* could not be loaded: .*folder with a CLIP",
    ):
        pick_score(tmp_path / "nothing")

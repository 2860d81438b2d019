"""A very small vision-language model, made in code."""

from pathlib import Path

import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from tests.factories.tiny import tiny_tokenizer


VISION_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tiny_vision(path: str | Path) -> str:
    """
    Save a Llava of pictures of 8 x 8 pixels, which are four tokens and one, with its processor; returns the path.
    """
    tokenizer = tiny_tokenizer(VISION_TEMPLATE, extra_tokens=("<image>",))
    pixels = {"height": 8, "width": 8}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size=pixels),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="full",
        chat_template=VISION_TEMPLATE,
        num_additional_image_tokens=1,
    )
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(hidden_size=16, intermediate_size=32, image_size=8, patch_size=4, **layers)
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
        **layers,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=5,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(path)
    processor.save_pretrained(path)
    return str(path)


def picture(i: int) -> Image.Image:
    """A picture that differs for each `i` below 80."""
    return Image.new("RGB", (8, 8), (3 * i, 255 - 3 * i, 7 * i % 256))


def picture_dataset(where: str = "image", n: int = 24) -> Dataset:
    """Conversations `"00"` to `"23"`, each with a picture of its own: in the column `image`, in a list in the column
    `images`, of which every third has two, or in the `message` itself.
    """
    pictures = [[picture(i), picture(i + 40)][: 1 + (where == "images" and i % 3 == 0)] for i in range(n)]
    if where != "message":
        prompts = [[{"role": "user", "content": f"{i:02d}"}] for i in range(n)]
        columns = {"prompt": prompts, where: pictures if where == "images" else [first for first, *_ in pictures]}
        kind = [ImageFeature()] if where == "images" else ImageFeature()
        return Dataset.from_dict(columns).cast_column(where, kind)
    content = [{"type": Value("string"), "text": Value("string"), "image": ImageFeature()}]
    features = Features({"prompt": [{"role": Value("string"), "content": content}]})
    parts = [
        [{"type": "image", "text": None, "image": first}, {"type": "text", "text": f"{i:02d}", "image": None}]
        for i, (first, *_) in enumerate(pictures)
    ]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in parts]}, features=features)

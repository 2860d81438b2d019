"""
Train a vision-language model to count, with selection and replay.

    python examples/vision_language.py \
        --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dtype bfloat16 \
        --use_peft --lora_target_modules all-linear --lora_dropout 0 --learning_rate 1e-5 \
        --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --num_generations 8 \
        --max_completion_length 64 --max_steps 200 --output_dir outputs/vision_language

`selection="dots"` predicts a prompt's success rate from its text and from its own earlier groups; `selection="greso"`
uses the latter alone. The image is not embedded: DOTS helps to the extent that the text of a prompt, or what the run
has seen of it, says how hard it is. The images of replayed groups are read from the dataset again. The
script switches selection and replay on.
"""

import random

from datasets import Dataset
from PIL import Image, ImageDraw
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_dataeff import DataEfficientGRPOConfig, DataEfficientGRPOTrainer
from trl_dataeff.rewards import numeric_answer_reward


def draw_squares(count: int, side: int = 224) -> Image.Image:
    """Squares in different cells of a grid of five by five."""
    picture = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(picture)
    cell = side // 5
    margin = cell // 4
    width = 3 * cell // 4 - margin
    for place in random.sample(range(25), count):
        row, column = divmod(place, 5)
        left = column * cell + margin
        top = row * cell + margin
        draw.rectangle([left, top, left + width, top + width], fill="blue")
    return picture


def make_dataset(n: int) -> Dataset:
    """Two questions of different difficulty about pictures of up to 12 squares."""
    rows = []
    for i in range(n):
        count = random.randint(1, 12)
        if i % 2 == 0:
            question = "Is there a square? 1 or 0."
            answer = 1
        else:
            question = "How many squares are there?"
            answer = count
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "image": draw_squares(count), "answer": answer})
    return Dataset.from_list(rows)


if __name__ == "__main__":
    parser = TrlParser((DataEfficientGRPOConfig, ModelConfig))
    parser.set_defaults(selection="dots", replay="fill")
    training_args, model_args = parser.parse_args_and_config()
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }

    random.seed(0)
    trainer = DataEfficientGRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=numeric_answer_reward,
        train_dataset=make_dataset(500),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)

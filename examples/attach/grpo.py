"""GPT-2 under TRL's GRPOTrainer, rewarded for one letter, and its golden twin: `python grpo.py OUT`."""

import sys
import tempfile

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from harness import attach
from harness.objectives.outcome import judge_rewards

STEPS, LENGTH, LETTERS = 20, 8, "abcdefghijklmnopqrstuvwxyz"


def tokenizer():
    core = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate("." + LETTERS)}, unk_token="."))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=".", pad_token=".", padding_side="left")


def share_of_a(completions, **_):
    return [text.count("a") / LENGTH for text in completions]


def trainer_of(folder, callbacks=(), **options):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(LETTERS) + 1, "n_positions": 2 * LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    arguments = {
        "max_steps": STEPS, "per_device_train_batch_size": 32, "num_generations": 8, "max_completion_length": LENGTH,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_dropout": True, **options,
    }  # fmt: skip
    prompts, config = Dataset.from_dict({"prompt": list(LETTERS)}), GRPOConfig(folder, **arguments)
    trainer = GRPOTrainer(model, share_of_a, config, prompts, processing_class=tokenizer(), callbacks=[*callbacks])
    trainer.remove_callback(PrinterCallback)
    return trainer


def rewards(trainer):
    return np.array([row["reward"] for row in trainer.state.log_history if "reward" in row])


if __name__ == "__main__":
    callback = attach.TrainerCallback(fault={"name": "weight_bit", "start": 10}, out=sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(folder, callbacks=[callback])
        trainer.train()
        own = rewards(trainer)
        callback.twin(trainer)
    (event,) = callback.events
    print(f"step {event.step}: {event.before} became {event.after} in {event.tensor}")
    print(f"farthest from the golden twin: {np.nanmax(abs(callback.deviation)):.3g} in the loss", end=", ")
    print(f"{max(abs(own - rewards(trainer))):.3g} in the reward")
    print(f"outcome by the loss: {callback.outcome}, by the reward: {judge_rewards(own, None)}")

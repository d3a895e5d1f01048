"""GPT-2 of `transformers` under its Trainer, on Python's source, and its golden twin: `python gpt2_trainer.py OUT`."""

import argparse
import inspect
import sys
import tempfile

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from harness import attach

STEPS, CONTEXT = 60, 32
TEXT = torch.tensor(list(inspect.getsource(argparse).encode()))


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return len(TEXT) // CONTEXT

    def __getitem__(self, index):
        ids = TEXT[CONTEXT * index : CONTEXT * (index + 1)]
        return {"input_ids": ids, "labels": ids}


torch.manual_seed(0)
sizes = {"vocab_size": 256, "n_positions": CONTEXT, "n_embd": 48, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
callback = attach.TrainerCallback(
    fault={"name": "gradient_bit", "start": 30, "tensor": "transformer.h.*.attn.*", "bit": 30}, out=sys.argv[1]
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=8, learning_rate=3e-3, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=STEPS,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Texts(), callbacks=[callback])
    trainer.train()
    callback.twin(trainer)
(event,) = callback.events
alarms = np.flatnonzero(callback.signals["alarm_combined"])
print(f"step {event.step}: {event.before} became {event.after} in the gradient of {event.tensor}")
print(f"alarms at steps {alarms.tolist()}; farthest from the golden twin: {np.nanmax(abs(callback.deviation)):.3g} nat")

"""Train with Hugging Face's `Trainer`, and resume in the middle of an epoch.

    pip install transformers accelerate
    python train.py          # kill it at any time and run it again
    trinity-sync ls ckpts

The callback saves at the steps at which `Trainer` would, in its place, and keeps `save_total_limit`
of them. The model is a tiny random GPT-2, so nothing is downloaded.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from trinity_sync.integrations.huggingface import TrinitySyncCallback

torch.manual_seed(0)
tokens = torch.randint(64, (2000, 32))
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=128, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
)

saves = TrinitySyncCallback("ckpts")
arguments = TrainingArguments(
    output_dir="out",  # the checkpoints are in ckpts instead
    max_steps=120,
    per_device_train_batch_size=16,
    save_steps=20,
    save_total_limit=3,
    logging_steps=20,
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[saves])

newest = saves.latest()  # None on the first start
if newest:
    print(f"resumed from {newest}")
trainer.train(resume_from_checkpoint=newest)  # raises SaveFailedError if a save failed

"""Write what `run_sft.sh` trains: a random Qwen2 of two layers, and twenty conversations.

python tiny.py           # writes model/ and train.parquet
"""

import sys
from pathlib import Path

import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from grpo_copy.model import LETTERS, create_model

CHAT = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
ROWS = 20


def main(folder: Path) -> None:
    """Write the model with its tokenizer and chat template, and the data, into `folder`."""
    (create_model(folder / "model") / "chat_template.jinja").write_text(CHAT)
    rows = [
        [
            {"role": "user", "content": f"<copy> {LETTERS[n % 12]}"},
            {"role": "assistant", "content": f"{LETTERS[n % 12]} {LETTERS[n % 7]} <eos>"},
        ]
        for n in range(ROWS)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(folder / "train.parquet")


if __name__ == "__main__":
    main(Path.cwd())
